// All answers come from counters: an event costs time only for the blocks and tensors that depend on it.
#include "engine/follower.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "gradcast/error.h"

namespace gradcast {
namespace {

// The tensors of a block, by offset.
std::vector<int32_t> tensors_of(const Block& block, const BufferLayout& buffer) {
  std::vector<int32_t> tensors;
  for (const Range& range : block.ranges) {
    for (const int32_t tensor : buffer.tensors_in(range)) {
      // Two ranges of a block may lie in one tensor.
      if (tensors.empty() || tensors.back() != tensor) {
        tensors.push_back(tensor);
      }
    }
  }
  return tensors;
}

// By block: the all-gather that belongs to a reduce-scatter and the other way round; -1 for an all-reduce.
std::vector<int32_t> partners_of(const std::vector<Block>& blocks) {
  std::vector<int32_t> partner(blocks.size(), -1);
  std::map<std::pair<int32_t, int64_t>, size_t> scatters;  // by buffer and first byte, which no two scatters share
  for (size_t k = 0; k < blocks.size(); ++k) {
    const Block& block = blocks[k];
    const auto place = std::pair(block.buffer, block.ranges.front().lo_bytes);
    if (block.op == Op::kReduceScatter) {
      scatters[place] = k;
    } else if (block.op == Op::kAllGather) {
      const auto found = scatters.find(place);
      if (found == scatters.end() || blocks[found->second].ranges != block.ranges) {
        throw Error(ErrorCode::kInvalidPlan,
                    "blocks[" + std::to_string(k) +
                        "] gathers other ranges than one block has reduce-scattered; to be followed, a plan gathers "
                        "each reduce-scatter whole");
      }
      partner[k] = static_cast<int32_t>(found->second);
      partner[found->second] = static_cast<int32_t>(k);
    }
  }
  return partner;
}

}  // namespace

FollowedPlan::FollowedPlan(const Profile& profile, const Plan& given)
    : plan(given),
      blocks_waiting(profile.tensors.size()),
      arriving_count(profile.tensors.size(), 0),
      last_block(profile.tensors.size(), -1),
      partner(partners_of(given.blocks)) {
  for (const Tensor& tensor : profile.tensors) {
    tensor_names.push_back(tensor.name);
  }
  const std::vector<BufferLayout> buffers = buffers_of(profile);
  for (int32_t k = 0; k < block_count(); ++k) {
    const Block& block = plan.blocks[k];
    block_tensors.push_back(tensors_of(block, buffers[block.buffer]));
    for (const int32_t tensor : block_tensors.back()) {
      if (block.op != Op::kAllGather) {
        blocks_waiting[tensor].push_back(k);
      }
      if (block.op != Op::kReduceScatter) {
        ++arriving_count[tensor];
        last_block[tensor] = k;
      }
    }
  }
}

// Counts for each block what it waits for, and for each tensor how many blocks must finish before it has arrived.
void Follower::begin(std::shared_ptr<const FollowedPlan> plan) {
  GC_CHECK(in_flight_count_ == 0);
  plan_ = std::move(plan);
  next_block_ = 0;
  states_.assign(plan_->plan.blocks.size(), BlockState::kWaiting);
  missing_.resize(states_.size());
  for (size_t k = 0; k < missing_.size(); ++k) {
    const bool gathers = plan_->plan.blocks[k].op == Op::kAllGather;
    missing_[k] = gathers ? 1 : static_cast<int32_t>(plan_->block_tensors[k].size());
  }
  unfinished_ = plan_->arriving_count;
  unqueued_ = plan_->arriving_count;
}

void Follower::on_ready(int32_t tensor) {
  GC_CHECK(is_open());
  for (const int32_t block : plan_->blocks_waiting[tensor]) {
    GC_CHECK(missing_[block] > 0);
    --missing_[block];
  }
}

// Looks at one block only, the next of the plan. If that one must wait, so must all behind it.
std::optional<int32_t> Follower::next() {
  if (!has_room_for_next() || missing_[next_block_] > 0) {
    return std::nullopt;
  }
  states_[next_block_] = BlockState::kInFlight;
  ++in_flight_count_;
  return next_block_++;
}

void Follower::on_queued(int32_t block) {
  GC_CHECK(is_in_flight(block));
  if (states_[block] == BlockState::kQueued) {
    return;
  }
  states_[block] = BlockState::kQueued;
  ++queued_count_;
  if (plan_->plan.blocks[block].op == Op::kReduceScatter) {
    return;  // nothing arrives by it alone
  }
  for (const int32_t tensor : plan_->block_tensors[block]) {
    --unqueued_[tensor];
  }
}

// A reduce-scatter brings no tensor, but it releases its all-gather.
std::vector<int32_t> Follower::on_finish(int32_t block) {
  on_queued(block);
  states_[block] = BlockState::kFinished;
  --queued_count_;
  --in_flight_count_;
  std::vector<int32_t> arrived;
  if (plan_->plan.blocks[block].op == Op::kReduceScatter) {
    --missing_[plan_->partner[block]];
    return arrived;
  }
  for (const int32_t tensor : plan_->block_tensors[block]) {
    if (--unfinished_[tensor] == 0) {
      arrived.push_back(tensor);
    }
  }
  return arrived;
}

Progress Follower::progress_of(int32_t tensor) const {
  if (unqueued_[tensor] > 0) {
    return Progress::kTravelling;
  }
  return unfinished_[tensor] > 0 ? Progress::kQueued : Progress::kArrived;
}

bool Follower::all_queued() const {
  return std::ranges::find(states_, BlockState::kInFlight) == states_.end();
}

bool Follower::is_in_flight(int64_t block) const {
  return is_open() && block >= 0 && block < plan_->block_count() &&
         (states_[block] == BlockState::kInFlight || states_[block] == BlockState::kQueued);
}

// The engine sleeps through this many gradients, so the answer may be too small but never too large.
size_t Follower::ready_missing_min() const {
  const bool helps = has_room_for_next() && plan_->plan.blocks[next_block_].op != Op::kAllGather;
  return helps ? static_cast<size_t>(missing_[next_block_]) : std::numeric_limits<size_t>::max();
}

}  // namespace gradcast
