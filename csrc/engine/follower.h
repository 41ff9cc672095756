// The follower: selects the block that may start now, and tracks each tensor's progress. Events are reported to it; it
// reads no clock.
//
// Blocks start in the plan's order only, at most `in_flight` at a time. Blocks in a device's queue are not counted
// there, because that queue keeps the order; the window limits their number. Facts that only one rank knows (its own
// gradients, its own clock) may delay a block, but never let another block pass it. That keeps the operations of all
// ranks matched.
//
// Thread safety: pure; any thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gradcast/plan.h"
#include "gradcast/profile.h"

namespace gradcast {

// A plan with its dependencies: the blocks that each tensor waits for, and the other way round. Iterations share it.
struct FollowedPlan {
  // Throws Error{kInvalidPlan} if an all-gather does not carry exactly the ranges of one reduce-scatter: each rank owns
  // a part of a *block*, so other cuts would gather parts that no rank has summed. REQUIRES: check_plan(plan, profile)
  // passed.
  FollowedPlan(const Profile& profile, const Plan& plan);

  int32_t tensor_count() const { return static_cast<int32_t>(tensor_names.size()); }
  int32_t block_count() const { return static_cast<int32_t>(plan.blocks.size()); }

  Plan plan;

  // By tensor.
  std::vector<std::string> tensor_names;
  std::vector<std::vector<int32_t>> blocks_waiting;  // all-reduces and reduce-scatters that wait for its gradient
  std::vector<int32_t> arriving_count;  // all-reduces and all-gathers that must finish before it has arrived
  std::vector<int32_t> last_block;      // the last one of those

  // By block.
  std::vector<std::vector<int32_t>> block_tensors;  // by offset
  std::vector<int32_t> partner;  // the all-gather of a reduce-scatter, and the other way round; -1 for an all-reduce
};

class Follower {
 public:
  // `window`: EngineOptions::queue_window. Without one, `in_flight` limits what is queued, too.
  explicit Follower(int32_t window = 1) : window_(window) {}

  // Opens an iteration: no gradient exists, nothing has arrived. REQUIRES: none() in flight.
  void begin(std::shared_ptr<const FollowedPlan> plan);

  // REQUIRES: an iteration is open; once per tensor.
  void on_ready(int32_t tensor);

  // The block that starts now, if one may; it counts as in flight from this moment.
  std::optional<int32_t> next();

  // A device will end the block without the host. REQUIRES: is_in_flight(block).
  void on_queued(int32_t block);
  // Returns the tensors that arrive with this block. REQUIRES: is_in_flight(block).
  std::vector<int32_t> on_finish(int32_t block);
  Progress progress_of(int32_t tensor) const;
  // True if a device will end all blocks in flight without the host.
  bool all_queued() const;

  // True for a block that has started and not finished; false for any other number.
  bool is_in_flight(int64_t block) const;
  int32_t in_flight_count() const { return in_flight_count_; }
  // The least number of further calls of on_ready before next() returns a block; the largest size_t if on_ready alone
  // cannot make it do so.
  size_t ready_missing_min() const;

  bool is_open() const { return plan_ != nullptr; }
  const FollowedPlan& plan() const { return *plan_; }

 private:
  // There is a next block, and room in flight for it.
  bool has_room_for_next() const {
    return is_open() && next_block_ < plan_->block_count() &&
           in_flight_count_ - queued_count_ < plan_->plan.in_flight &&
           in_flight_count_ < std::max(window_, plan_->plan.in_flight);
  }

  enum class BlockState : uint8_t { kWaiting, kInFlight, kQueued, kFinished };

  int32_t window_;
  std::shared_ptr<const FollowedPlan> plan_;
  int32_t next_block_ = 0;
  int32_t in_flight_count_ = 0;  // with those that are queued
  int32_t queued_count_ = 0;
  std::vector<BlockState> states_;
  std::vector<int32_t> missing_;     // by block: gradients (for an all-gather: reduce-scatters) that it still waits for
  std::vector<int32_t> unfinished_;  // by tensor: blocks that it still waits for
  std::vector<int32_t> unqueued_;    // by tensor: those of them that are not queued
};

}  // namespace gradcast
