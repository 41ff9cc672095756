// forecast where no proof applies: windows that are not nested, bent costs, several buffers, several blocks in flight.
//
// Chains of enlarged and shrunk windows give plans to start from, the policies of the literature more; a local search
// and, for a few tensors, a beam search improve them. Never worse than any other policy with its defaults.
//
// Source: docs/internals/planner.md, "Where the proof ends". Thread safety: pure; any thread.
#pragma once

#include "cost/problem.h"
#include "planner/candidate.h"

namespace gradcast {

// `effort` and `block_tolerance` as in ForecastOptions. With effort 0 neither a search nor the other policies are
// tried.
Candidate general_plan(const Problem& problem, double effort, double block_tolerance);

}  // namespace gradcast
