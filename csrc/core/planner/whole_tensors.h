// The best hook-mode plan of whole tensors in the order in which they become ready: all that DDP's buckets can express.
//
// For a given end, fill buckets from the last one backwards, each with as many tensors as fit between the moment its latest
// tensor is ready and the start of the bucket after it. Exact for a linear cost by the same exchange as zigzag; the end is
// found by bisection.
//
// Source: docs/planner.md, "Hook mode". Thread safety: pure; any thread.
#pragma once

#include <vector>

#include "gradcast/plan.h"
#include "problem.h"

namespace gradcast {

// REQUIRES: problem.mode is kHook. Where several buffers are interleaved a bucket also ends at a change of buffer.
std::vector<Block> whole_tensor_blocks(const Problem& problem);

}  // namespace gradcast
