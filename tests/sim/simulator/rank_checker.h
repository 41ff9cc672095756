// Checks one rank against the rules. It is told what the follower decides and what happens.
//
// It shares the tables of FollowedPlan with the follower, which have tests of their own, and none of the follower's
// state. A follower that starts a block too early, out of order or too often breaks a rule here. Bits in place of
// counters: slower than the follower, and simple enough to be seen to be right.
//
// Thread safety: pure; any thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "engine/follower.h"
#include "gradcast/error.h"
#include "tests/sim/simulator/simulate.h"

namespace gradcast::sim {

class RankChecker {
 public:
  // Opens an iteration. The plan must outlive it.
  void begin(const FollowedPlan& plan) {
    plan_ = &plan;
    launched_count_ = finished_count_ = arrived_count_ = 0;
    ready_.assign(plan.tensor_names.size(), false);
    arrived_.assign(plan.tensor_names.size(), false);
    finished_.assign(plan.plan.blocks.size(), false);
  }

  // REQUIRES: once per tensor.
  void on_ready(int32_t tensor) {
    GC_CHECK(!ready_[tensor]);
    ready_[tensor] = true;
  }

  // The follower starts a block; a block has ended. Both return the rule that this breaks, if any. The checker must not
  // be used after that.
  std::optional<SimRule> on_launch(int32_t block) {
    const auto fault = block == launched_count_ ? fault_of_next() : SimRule::kPlanOrder;
    launched_count_ += fault ? 0 : 1;
    return fault;
  }
  // `arrived`: the tensors that arrive with it according to the follower.
  std::optional<SimRule> on_finish(int64_t block, const std::vector<int32_t>& arrived) {
    if (block < 0 || block >= launched_count_ || finished_[block]) {
      return SimRule::kOneEnd;
    }
    finished_[block] = true;
    ++finished_count_;
    for (const int32_t tensor : arrived) {
      if (arrived_[tensor] || !is_brought(tensor)) {
        return SimRule::kArrival;
      }
      arrived_[tensor] = true;
      ++arrived_count_;
    }
    const bool all_arrived = arrived_count_ == plan_->tensor_count();
    return all_finished() && !all_arrived ? std::optional(SimRule::kArrival) : std::nullopt;
  }

  // False if the rules forbid the next block. A follower that starts nothing must be right about that, too.
  bool next_may_start() const { return !fault_of_next(); }

  bool is_ready(int32_t tensor) const { return ready_[tensor]; }
  bool has_arrived(int32_t tensor) const { return arrived_[tensor]; }
  bool all_finished() const { return finished_count_ == plan_->block_count(); }
  int32_t launched_count() const { return launched_count_; }
  // REQUIRES: !all_finished().
  int32_t oldest_unfinished() const {
    return static_cast<int32_t>(std::ranges::find(finished_, false) - finished_.begin());
  }

 private:
  // What forbids the next block of the plan to start now.
  std::optional<SimRule> fault_of_next() const {
    const int32_t block = launched_count_;
    if (block == plan_->block_count()) {
      return SimRule::kPlanOrder;
    }
    if (launched_count_ - finished_count_ >= plan_->plan.in_flight) {
      return SimRule::kInFlight;
    }
    const bool has_all =
        plan_->plan.blocks[block].op == Op::kAllGather
            ? finished_[plan_->partner[block]]
            : std::ranges::all_of(plan_->block_tensors[block], [&](int32_t tensor) { return is_ready(tensor); });
    return has_all ? std::nullopt : std::optional(SimRule::kReady);
  }

  // A gather brings exactly the ranges of its scatter, so the blocks that wait for a tensor tell those that bring it.
  bool is_brought(int32_t tensor) const {
    return std::ranges::all_of(plan_->blocks_waiting[tensor], [&](int32_t block) {
      const int32_t gather = plan_->partner[block];
      return bool{finished_[gather < 0 ? block : gather]};
    });
  }

  const FollowedPlan* plan_ = nullptr;
  int32_t launched_count_ = 0;
  int32_t finished_count_ = 0;
  int32_t arrived_count_ = 0;
  // By tensor and by block: bits, of which there is a set on every rank.
  std::vector<bool> ready_, arrived_, finished_;
};

}  // namespace gradcast::sim
