// The link in virtual time: the rule by which play, and every policy that plans ahead, launches and finishes blocks.
//
// Thread safety: pure; any thread.
#pragma once

#include <algorithm>
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
  double free_ns() const {
    const auto in_flight = static_cast<size_t>(problem_->in_flight);
    return std::max(launch_ns_, finish_ns_.size() >= in_flight ? finish_ns_[finish_ns_.size() - in_flight] : 0);
  }

  // Launches a block at max(now_ns, free_ns()); returns its finish.
  double launch(double now_ns, int64_t size_bytes, Op op = Op::kAllReduce, bool packed = false) {
    const BlockCost cost = block_cost(problem_->link, op, size_bytes, packed);
    const double wire_free_ns = finish_ns_.empty() ? 0 : finish_ns_.back();
    launch_ns_ = std::max(now_ns, free_ns());
    finish_ns_.push_back(std::max(launch_ns_ + cost.alpha_ns, wire_free_ns) + cost.bytes_ns);
    return finish_ns_.back();
  }

  // When the last block was launched.
  double launch_ns() const { return launch_ns_; }

 private:
  const Problem* problem_;
  double launch_ns_ = 0;
  std::vector<double> finish_ns_;
};

}  // namespace gradcast
