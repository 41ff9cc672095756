// Beam search: near-optimal plans for a few tensors whose windows are not nested.
//
// For a given iteration time it builds plans block by block, keeping the few partial plans that look best, and drops
// those that even free preemption could not complete in time; the iteration time is found by bisection.
//
// Source: docs/internals/planner.md, "General windows". Thread safety: pure; any thread.
#pragma once

#include <vector>

#include "cost/problem.h"
#include "gradcast/plan.h"

namespace gradcast {

// Profiles of more tensors are refused: the states hold the bytes left of each.
inline constexpr int32_t kBeamTensorsMax = 8;

struct BeamOptions {
  int32_t width = 64;                // partial plans kept after each block
  int64_t extensions_max = 100'000;  // blocks tried in all, a good fraction of a microsecond each
  double bound_ns = 0;               // nothing is faster
  double best_ns = 0;                // a plan that is known; only faster ones are of interest
};

// The best plan found that is faster than options.best_ns; no blocks if there is none.
// REQUIRES: problem.tensor_count() <= kBeamTensorsMax, in_flight 1.
std::vector<Block> beam_search(const Problem& problem, const BeamOptions& options);

}  // namespace gradcast
