// Plans while one is being chosen: blocks with the time that play gives them.
//
// Thread safety: pure; any thread.
#pragma once

#include <limits>
#include <utility>
#include <vector>

#include "cost/problem.h"

namespace gradcast {

struct Candidate {
  std::vector<Block> blocks;
  double iteration_ns = std::numeric_limits<double>::infinity();
};

// Keeps the fastest of the plans that it is shown; the earlier one of equals.
class Fastest {
 public:
  explicit Fastest(const Problem& problem) : problem_(problem) {}

  // REQUIRES: the blocks are a whole plan; none at all are passed over.
  void consider(std::vector<Block> blocks) {
    if (blocks.empty()) {
      return;
    }
    const double candidate_ns = gradcast::iteration_ns(problem_, blocks);
    if (candidate_ns < best_.iteration_ns) {
      best_ = {std::move(blocks), candidate_ns};
    }
  }
  const Candidate& best() const { return best_; }
  double iteration_ns() const { return best_.iteration_ns; }

 private:
  const Problem& problem_;
  Candidate best_;
};

}  // namespace gradcast
