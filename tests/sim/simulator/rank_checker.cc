// Bits in place of counters: slower than the follower, and simple enough to be seen to be right.
#include "tests/sim/simulator/rank_checker.h"

#include <algorithm>

#include "gradcast/error.h"

namespace gradcast::sim {

void RankChecker::begin(const FollowedPlan& plan) {
  plan_ = &plan;
  launched_count_ = 0;
  finished_count_ = 0;
  arrived_count_ = 0;
  ready_.assign(plan.tensor_names.size(), false);
  arrived_.assign(plan.tensor_names.size(), false);
  finished_.assign(plan.plan.blocks.size(), false);
}

void RankChecker::on_ready(int32_t tensor) {
  GC_CHECK(!ready_[tensor]);
  ready_[tensor] = true;
}

std::optional<SimRule> RankChecker::on_launch(int32_t block) {
  const auto fault = block == launched_count_ ? fault_of_next() : SimRule::kPlanOrder;
  launched_count_ += fault ? 0 : 1;
  return fault;
}

// What forbids the next block of the plan to start now.
std::optional<SimRule> RankChecker::fault_of_next() const {
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
          : std::ranges::all_of(plan_->block_tensors[block], [&](int32_t tensor) { return bool{ready_[tensor]}; });
  return has_all ? std::nullopt : std::optional(SimRule::kReady);
}

std::optional<SimRule> RankChecker::on_finish(int64_t block, const std::vector<int32_t>& arrived) {
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

int32_t RankChecker::oldest_unfinished() const {
  const auto oldest = std::find(finished_.begin(), finished_.end(), false);
  GC_CHECK(oldest != finished_.end());
  return static_cast<int32_t>(oldest - finished_.begin());
}

// A gather brings exactly the ranges of its scatter, so the blocks that wait for a tensor tell those that bring it.
bool RankChecker::is_brought(int32_t tensor) const {
  return std::ranges::all_of(plan_->blocks_waiting[tensor], [&](int32_t block) {
    const int32_t gather = plan_->partner[block];
    return bool{finished_[gather < 0 ? block : gather]};
  });
}

}  // namespace gradcast::sim
