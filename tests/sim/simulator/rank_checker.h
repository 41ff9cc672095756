// Checks one rank against the rules. It is told what the follower decides and what happens.
//
// It shares the tables of FollowedPlan with the follower, which have tests of their own, and none of the follower's
// state. A follower that starts a block too early, out of order or too often breaks a rule here.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/follower.h"
#include "tests/sim/simulator/simulate.h"

namespace gradcast::sim {

class RankChecker {
 public:
  // Opens an iteration. The plan must outlive it.
  void begin(const FollowedPlan& plan);

  // REQUIRES: once per tensor.
  void on_ready(int32_t tensor);
  // The follower starts a block; a block has ended. Both return the rule that this breaks, if any. The checker must not
  // be used after that.
  std::optional<SimRule> on_launch(int32_t block);
  // `arrived`: the tensors that arrive with it according to the follower.
  std::optional<SimRule> on_finish(int64_t block, const std::vector<int32_t>& arrived);

  // False if the rules forbid the next block. A follower that starts nothing must be right about that, too.
  bool next_may_start() const { return !fault_of_next(); }

  bool is_ready(int32_t tensor) const { return ready_[tensor]; }
  bool has_arrived(int32_t tensor) const { return arrived_[tensor]; }
  bool all_finished() const { return finished_count_ == plan_->block_count(); }
  int32_t launched_count() const { return launched_count_; }
  // REQUIRES: !all_finished().
  int32_t oldest_unfinished() const;

 private:
  std::optional<SimRule> fault_of_next() const;
  bool is_brought(int32_t tensor) const;

  const FollowedPlan* plan_ = nullptr;
  int32_t launched_count_ = 0;
  int32_t finished_count_ = 0;
  int32_t arrived_count_ = 0;
  // By tensor and by block: bits, of which there is a set on every rank.
  std::vector<bool> ready_;
  std::vector<bool> arrived_;
  std::vector<bool> finished_;
};

}  // namespace gradcast::sim
