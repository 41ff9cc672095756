// The searches that improve plans where no proof applies: piecewise costs, several buffers, windows that are not nested.
//
// Source: docs/internals/planner.md, "General windows". Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "cost/problem.h"
#include "planner/window_filler.h"

namespace gradcast {

// Local search over send windows: change one block of a plan at a time and keep what is faster. The exact planner's plans
// are good starts; moving, merging, splitting and resizing single blocks closes most of what is left.
struct LocalSearchOptions {
  int64_t evaluations = 0;  // changes to try
  double target_ns = 0;     // stop here: nothing is faster
};

// The best send windows found, starting from `send_windows`; never slower. Deterministic: the changes come from a fixed
// sequence.
std::vector<SendWindow> local_search(const Problem& problem, WindowFiller& filler, std::vector<SendWindow> send_windows,
                                     const LocalSearchOptions& options);

// Beam search, for a few tensors: near-optimal. For a given iteration time it builds plans block by block, keeping the few
// partial plans that look best, and drops those that even free preemption could not complete in time; the iteration time
// is found by bisection.

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
