// forecast: gradcast's own policy and the default. It splits large gradients and fuses small ones in one plan, and
// knows how far that plan is from the best.
//
// Where later ready means more urgent (every sequential model), the cost is linear and one block is in flight, the plan
// is the best there is: zigzag (planner/zigzag.h) finds the optimum T* exactly, with one byte range per block.
// Elsewhere chains of enlarged and shrunk windows give bounds and plans, the policies of the literature give more, and
// a bounded search improves them; the result is never worse than any of those policies with their defaults.
//
// All this is about the network. Where parts of the optimizer's step, or a host that gives a device its work, cost time,
// plans of fewer blocks are made, too, and play decides.
//
// Source: ours; docs/internals/planner.md has the statement, the proof and the evidence. Thread safety: pure; any thread.
#pragma once

#include <vector>

#include "cost/pieces.h"

namespace gradcast {

struct ForecastOptions {
  // Share of the optimum to give up for fewer blocks: 0.002 takes the fewest blocks within 0.2 % of it; where no
  // exact plan is known, as few as merging neighbours leads to.
  double block_tolerance = 0;
  // Plans for alpha and beta times 1 - uncertainty, 1 and 1 + uncertainty each, and takes of these nine plans the one
  // whose worst ratio to the nine is smallest.
  double uncertainty = 0;
  // Length of the search where the plan is not exact: 1 is about 40 ms for 1,000 tensors; 0 neither searches nor tries
  // the other policies. A count of steps, not a clock, so that a plan is a function of its profile.
  double effort = 1;
  // Hook mode only: a plan of whole tensors in ready order, which stock DDP can follow by its bucket sizes. The best
  // one where the cost is linear, there is one buffer and packing is free.
  bool whole_tensors = false;
};

// Throws Error{kInvalidOption} for whole_tensors in overlap mode.
std::vector<Block> forecast(const Problem& problem, const ForecastOptions& options);

// forecast where no proof applies: windows that are not nested, bent costs, several buffers, several blocks in flight.
// Chains of enlarged and shrunk windows give plans to start from, the policies of the literature more; a local search
// and, for a few tensors, a beam search improve them. With effort 0 neither a search nor the other policies are tried.
Candidate general_plan(const Problem& problem, double effort, double block_tolerance);

}  // namespace gradcast
