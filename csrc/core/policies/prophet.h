// prophet: gradients become ready in bursts, so the bytes that fit into the gap before the next burst travel as one
// block.
//
// During backward, when a burst is complete, the most urgent bytes of everything that waits are sent, as many as the
// link carries until the next (more urgent) burst; the rest sinks and competes again after that burst. So a less
// urgent block is gone, by the prediction, when the more urgent gradients appear. After the last burst: strict
// priority with a credit.
//
// Source: Zhang et al., "Prophet: Speeding up Distributed DNN Training with Predictable Communication Scheduling"
// (ICPP 2021); scheduled_queue.cc of the authors' code for what the paper leaves open.
//
// The paper's rules: a gap between consecutive ready times above twice the mean gap ends a burst. The budget is gap
// times bandwidth, without the start-up cost; whole partitions are taken until the next one does not fit. The
// bandwidth is the best ever observed, here one byte per smallest beta of the link.
//
// Choices, each in favour of the paper:
// * The gap of the budget runs from one complete burst to the next complete burst. With the paper's bursts, which take
//   no time, that is the gap between them; where a burst takes time, the link would idle through it otherwise.
// * What fits travels as one fused operation (per buffer), as the paper says; its code pushes partitions one by one,
//   which a parameter server pipelines and an all-reduce pays for.
// * After the last burst everything is ready, so a credit cannot change the order any more. What it does for the paper
//   is to keep many small messages in flight at once: here consecutive partitions that fit into `credit_bytes` share
//   one operation. The paper sets the credit by hand; the default 0 takes the best of the values listed in prophet.cc.
// * A profile without a burst boundary (all gaps alike) would send nothing before backward ends; there every ready
//   instant counts as a burst.
// * The code's stalls, its constants for one model and its rounding of the batch size are left out.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cost/problem.h"

namespace gradcast {

struct ProphetOptions {
  int64_t partition_bytes = 4'096'000;  // BYTEPS_PARTITION_BYTES
  int64_t credit_bytes = 0;             // 0: tuned; below a partition: every partition is an operation of its own
  double gap_factor = 2;                // of the mean gap, above which a gap ends a burst
};

// The bursts of gradients, as positions in `arrivals` (by_ready's order) at which a burst begins; the first is 0.
std::vector<int32_t> burst_starts(const Problem& problem, std::span<const int32_t> arrivals, double gap_factor);

// Throws Error{kInvalidOption} for partitions so small that there would be more than a million.
std::vector<Block> prophet(const Problem& problem, const ProphetOptions& options);

}  // namespace gradcast
