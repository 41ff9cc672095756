// Local search over send windows: change one block of a plan at a time and keep what is faster.
//
// The exact planner does not cover piecewise costs, several buffers and windows that are not nested. There its plans
// are good starts; moving, merging, splitting and resizing single blocks closes most of what is left.
//
// Source: docs/internals/planner.md, "General windows". Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "cost/problem.h"
#include "planner/window_filler.h"

namespace gradcast {

struct LocalSearchOptions {
  int64_t evaluations = 0;  // changes to try
  double target_ns = 0;     // stop here: nothing is faster
};

// The best send windows found, starting from `send_windows`; never slower. Deterministic: the changes come from a fixed
// sequence.
std::vector<SendWindow> local_search(const Problem& problem, WindowFiller& filler, std::vector<SendWindow> send_windows,
                                     const LocalSearchOptions& options);

}  // namespace gradcast
