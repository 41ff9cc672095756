// The link in virtual time: the rule by which play, and every policy that plans ahead, launches and finishes blocks.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "cost/problem.h"

namespace gradcast {

// Blocks are launched in order, at most in_flight unfinished at once; their bytes pass one wire in that order.
class VirtualLink {
 public:
  explicit VirtualLink(const Problem& problem) : problem_(&problem) {}

  // When the next block may be launched as far as the link is concerned: when fewer than in_flight blocks are
  // unfinished.
  double free_ns() const;
  // Launches a block at max(now_ns, free_ns()); returns its finish.
  double launch(double now_ns, int64_t size_bytes, Op op = Op::kAllReduce, bool packed = false);
  // When the last block was launched.
  double launch_ns() const { return launch_ns_; }

 private:
  const Problem* problem_;
  double launch_ns_ = 0;
  std::vector<double> finish_ns_;
};

}  // namespace gradcast
