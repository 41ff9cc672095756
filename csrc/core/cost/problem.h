// A planning problem: the numbers of a profile as arrays, which is what everything in the core computes with; and its
// link in virtual time.
//
// Profiles carry names and unknown fields, and the planner looks at the same few numbers many thousand times. A Problem
// also resolves the two modes once, so that no policy has to:
//   need_ns (q in docs/internals/planner.md): the forward work that precedes tensor i's read, updates of more urgent tensors included;
//   all 0 in hook mode, where everything is needed before forward starts.
//   forward_ns (F): forward and all updates.
// With them a plan's iteration time is max(B + F, max over i of arrival[i] + F - need[i]) in both modes, if parts of the
// optimizer's step and the host cost nothing.
//
// Thread safety: pure; any thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "gradcast/link.h"
#include "gradcast/plan.h"
#include "gradcast/play.h"
#include "gradcast/profile.h"
#include "gradcast/types.h"

namespace gradcast {

struct Problem {
  Mode mode = Mode::kOverlap;
  int32_t in_flight = 1;
  LinkModel link;
  double backward_ns = 0;
  double forward_ns = 0;
  double part_ns = 0;  // these four as in Profile
  double host_step_ns = 0;
  double host_part_ns = 0;
  double host_block_ns = 0;
  int64_t total_bytes = 0;

  // By tensor, in urgency order.
  std::vector<int64_t> bytes;
  std::vector<int64_t> offset_bytes;  // where the tensor begins in its buffer
  std::vector<int32_t> buffer;
  std::vector<double> ready_ns;
  std::vector<double> need_ns;
  std::vector<double> update_ns;

  std::vector<BufferLayout> buffers;

  int32_t tensor_count() const { return static_cast<int32_t>(bytes.size()); }
  int32_t buffer_count() const { return static_cast<int32_t>(buffers.size()); }
  int64_t element_bytes(int32_t tensor) const { return buffers[buffer[tensor]].element_bytes; }
  Range range_of(int32_t tensor) const { return {offset_bytes[tensor], offset_bytes[tensor] + bytes[tensor]}; }
  // Blocks and parts cost more than the network's time, so a plan of fewer may be faster.
  bool has_part_costs() const { return part_ns > 0 || host_part_ns > 0 || host_block_ns > 0; }
  // The host's own work with so many parts and blocks.
  double host_ns(int64_t parts, int64_t blocks) const {
    return host_step_ns + host_part_ns * static_cast<double>(parts - 1) + host_block_ns * static_cast<double>(blocks);
  }
  // The time at which the last read may end for an iteration of `iteration_ns`: d[i] in docs/internals/planner.md.
  double deadline_ns(int32_t tensor, double iteration_ns) const { return iteration_ns - forward_ns + need_ns[tensor]; }
};

// Checks profile and link, then builds. Throws Error.
Problem make_problem(const Profile& profile, const LinkModel& link, Mode mode, int32_t in_flight);
// The problem of the network alone: parts, blocks and the host cost nothing.
Problem without_host(Problem problem);

// Calls use(tensor) for each tensor that a block touches, once per range.
template <typename Use>
void for_each_tensor(const Problem& problem, const Block& block, Use use) {
  for (const Range& range : block.ranges) {
    std::ranges::for_each(problem.buffers[block.buffer].tensors_in(range), use);
  }
}

// The ready time of an all-reduce or reduce-scatter block: that of the last of its tensors.
double block_ready_ns(const Problem& problem, const Block& block);

// alpha and the time of the bytes of a block, packing included. Throws Error{kInvalidLink} if the link lacks block.op.
struct BlockCost {
  double alpha_ns = 0;
  double bytes_ns = 0;
  double total_ns() const { return alpha_ns + bytes_ns; }
};
BlockCost block_cost(const LinkModel& link, Op op, int64_t size_bytes, bool packed);
BlockCost block_cost(const LinkModel& link, const Block& block);

// The link in virtual time: the rule by which play, and every policy that plans ahead, launches and finishes blocks.
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

// True if ready never rises in urgency order: every tensor's window lies inside the next one's. Sequential models are
// like this.
bool is_nested(const Problem& problem);

// play() on a problem (see gradcast/play.h), except that in hook mode, where a problem does not know when parameters
// are read, read_ns is the start of forward. REQUIRES: the blocks pass check_plan.
Timeline play(const Problem& problem, std::span<const Block> blocks);
// The iteration time alone: what a search compares.
double iteration_ns(const Problem& problem, std::span<const Block> blocks);

}  // namespace gradcast
