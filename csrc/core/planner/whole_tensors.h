// The best hook-mode plan of whole tensors in the order in which they become ready: all that DDP's buckets can express.
//
// For a given end, fill buckets from the last one backwards, each with as many tensors as fit between the moment its
// latest tensor is ready and the start of the bucket after it. Exact for a linear cost by the same exchange as zigzag;
// the end is found by bisection.
//
// Source: docs/internals/planner.md, "Hook mode". Thread safety: pure; any thread.
#pragma once

#include <vector>

#include "cost/problem.h"
#include "gradcast/plan.h"

namespace gradcast {

// Best where the cost is linear, there is one buffer and packing is free. Elsewhere a good plan, or no blocks at all
// where filling from the end fails. A bucket also ends at a change of buffer. REQUIRES: problem.mode is kHook.
std::vector<Block> whole_tensor_blocks(const Problem& problem);

}  // namespace gradcast
