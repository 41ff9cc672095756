// The judge of one rank: is told what the follower decides and what happens, and knows the rules by itself.
//
// It shares the follower's tables of who touches what, which have tests of their own, and none of its state. A follower that
// starts a block too early, out of turn or too often breaks a rule here before it can harm another rank.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/follower.h"
#include "tests/sim/simulator/simulate.h"

namespace gradcast::sim {

class Watch {
 public:
  // Opens an iteration. The plan must outlive it.
  void begin(const FollowedPlan& plan);

  // REQUIRES: once per tensor.
  void on_ready(int32_t tensor);
  // What the follower wants to do, and what has happened. They return the rule that this breaks, if one; the watch is then of
  // no more use.
  std::optional<SimRule> on_launch(int32_t block);
  // With the tensors that are said to arrive by it.
  std::optional<SimRule> on_finish(int64_t block, const std::vector<int32_t>& arrived);

  // A follower that finds nothing to start must be right about it too.
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
