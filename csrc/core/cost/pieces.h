// Building blocks of plans: pieces of tensors, the blocks that carry them, and the fastest of
// several plans.
//
// Thread safety: pure; any thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cost/problem.h"

namespace gradcast {

// Bytes [from_bytes, to_bytes) of one tensor, counted from the tensor's start.
struct Piece {
  int32_t tensor = 0;
  int64_t from_bytes = 0;
  int64_t to_bytes = 0;

  int64_t size_bytes() const { return to_bytes - from_bytes; }
  bool operator==(const Piece&) const = default;
};

// Indices of the tensors by ready time; equal ones in backward's order, the less urgent first.
std::vector<int32_t> by_ready(const Problem& problem);

// The values ascending, each once.
template <typename Value>
std::vector<Value> distinct(std::vector<Value> values) {
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
  return values;
}

// One all-reduce of a piece.
Block piece_block(const Problem& problem, const Piece& piece, std::string reason);
// All pieces together: one all-reduce per buffer, in the order in which the buffers first appear.
std::vector<Block> joint_blocks(const Problem& problem, std::span<const Piece> pieces, const std::string& reason);
// Joins ranges of one buffer as a Block wants them: ascending, adjacent ones merged. REQUIRES: they are disjoint.
std::vector<Range> joined(std::vector<Range> ranges);

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
