// A planning problem: the numbers of a profile as arrays, which is what everything in the core computes with.
//
// Profiles carry names and unknown fields, and the planner looks at the same few numbers many thousand times. A Problem
// also resolves the two modes once, so that no policy has to:
//   need_ns (q in docs/internals/planner.md): the forward work that precedes tensor i's read, updates of more urgent tensors included;
//   all 0 in hook mode, where everything is needed before forward starts.
//   forward_ns (F): forward and all updates.
// With them a plan's iteration time is max(B + F, max over i of arrival[i] + F - need[i]) in both modes.
//
// Thread safety: pure; any thread.
#pragma once

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
  int64_t total_bytes = 0;

  // By tensor, in urgency order.
  std::vector<int64_t> bytes;
  std::vector<int64_t> offset_bytes;  // where the tensor begins in its buffer
  std::vector<int32_t> buffer;
  std::vector<double> ready_ns;
  std::vector<double> need_ns;
  std::vector<double> update_ns;

  // By buffer.
  std::vector<int64_t> buffer_bytes;
  std::vector<int32_t> element_bytes;
  std::vector<std::vector<int32_t>> buffer_tensors;    // urgency order, which is offset order
  std::vector<std::vector<int64_t>> buffer_end_bytes;  // where each of these tensors ends

  int32_t tensor_count() const { return static_cast<int32_t>(bytes.size()); }
  int32_t buffer_count() const { return static_cast<int32_t>(buffer_bytes.size()); }
  Range range_of(int32_t tensor) const { return {offset_bytes[tensor], offset_bytes[tensor] + bytes[tensor]}; }
  // The time at which the last read may end for an iteration of `iteration_ns`: d[i] in docs/internals/planner.md.
  double deadline_ns(int32_t tensor, double iteration_ns) const { return iteration_ns - forward_ns + need_ns[tensor]; }
};

// Checks profile and link, then builds. Throws Error.
Problem make_problem(const Profile& profile, const LinkModel& link, Mode mode, int32_t in_flight);

// Calls use(tensor) for each tensor that a block touches, once per range.
template <typename Use>
void for_each_tensor(const Problem& problem, const Block& block, Use use) {
  for (const Range& range : block.ranges) {
    const TensorSpan carried = tensors_in(problem.buffer_end_bytes[block.buffer], range);
    for (int32_t at = carried.first; at < carried.last; ++at) {
      use(problem.buffer_tensors[block.buffer][at]);
    }
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

// True if ready never rises in urgency order: every tensor's window lies inside the next one's. Sequential models are
// like this.
bool is_nested(const Problem& problem);

// play() on a problem (see gradcast/play.h), except that in hook mode, where a problem does not know when parameters
// are read, read_ns is the start of forward. REQUIRES: the blocks pass check_plan.
Timeline play(const Problem& problem, std::span<const Block> blocks);
// The iteration time alone: what a search compares.
double iteration_ns(const Problem& problem, std::span<const Block> blocks);

}  // namespace gradcast
