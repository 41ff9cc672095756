// A plan: the blocks of gradient bytes of one training iteration, and their order.
//
// All ranks hold the same plan and start its blocks in the same order; that is what keeps their collectives matched.
// A plan is a value: it is built once by a policy, checked, and never changed. A better one replaces it whole.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gradcast/profile.h"
#include "gradcast/types.h"

namespace gradcast {

// The content of one collective operation. One range is sent in place; several are packed, which costs a copy.
struct Block {
  Op op = Op::kAllReduce;
  int32_t buffer = 0;
  std::vector<Range> ranges{};  // ascending, disjoint, not adjacent, element-aligned, never empty
  double start_ns = 0;          // predicted launch, from the start of backward
  double finish_ns = 0;         // predicted, from the start of backward
  std::string reason{};         // why these bytes and why now, for people: shown in traces and reports
  std::string extra_json{};     // unknown fields of the JSON object, kept; "" if none

  int64_t size_bytes() const { return gradcast::size_bytes(ranges); }
  bool operator==(const Block&) const = default;
};

struct Plan {
  std::string policy;
  Mode mode = Mode::kOverlap;
  int32_t in_flight = 1;      // at most so many blocks between launch and finish
  std::vector<Block> blocks;  // in the order in which every rank starts them
  double predicted_ns = 0;    // iteration time that play() gives this plan
  double bound_ns = 0;        // no plan of this mode, in_flight and these kinds of operation is faster; see bound.h
  double plain_bound_ns = 0;  // the same by the simple formula, the yardstick of the literature
  std::string extra_json{};   // unknown fields of the JSON object, kept; "" if none

  bool operator==(const Plan&) const = default;
};

// The tensors of one buffer, in the order in which they lie there.
struct BufferLayout {
  std::vector<int32_t> tensors;    // as indices into the profile
  std::vector<int64_t> end_bytes;  // where each of them ends
  int32_t element_bytes = 1;

  int64_t size_bytes() const { return end_bytes.empty() ? 0 : end_bytes.back(); }
  // Those that a range of bytes touches. REQUIRES: the range is not empty and lies in the buffer.
  std::span<const int32_t> tensors_in(Range range) const;
};
// By buffer; one that no tensor names is empty.
std::vector<BufferLayout> buffers_of(const Profile& profile);

// Throws Error{kInvalidPlan}, naming the first fault, unless the plan carries every byte of `profile` exactly once (by
// one all-reduce, or one reduce-scatter and a later all-gather) and cuts no element. Ranks call it on every plan they
// receive, before they follow it.
void check_plan(const Plan& plan, const Profile& profile);

// Equal on two ranks exactly when they would send the same bytes of the same tensors in the same operations and order:
// over the blocks' kinds, buffers and ranges and the buffers' layout (names, sizes, element sizes, order); predictions,
// reasons and times do not count. Ranks compare it before a plan takes effect: following different plans averages the
// wrong bytes without an error.
uint64_t hash_plan(const Plan& plan, const Profile& profile);

// JSON schema version 1; see docs/reference/file-formats.md. Reading checks the plan by itself (numbers, ranges); check_plan holds it
// against a profile.
Plan plan_from_json(std::string_view text);
std::string to_json(const Plan& plan);

}  // namespace gradcast
