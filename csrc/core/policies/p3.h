// p3: priority-based parameter propagation: every tensor is cut into small slices, and whenever the link is free the
// most urgent slice that is ready goes next.
//
// A slice is the unit of preemption: an urgent gradient waits for at most one slice. Nothing is measured and nothing
// is merged, so every slice pays a start-up cost.
//
// Source: Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training" (MLSys 2019);
// the default of 40,000 elements is MXNET_KVSTORE_SLICE_THRESHOLD of the authors' code.
//
// Choices: the paper runs on a parameter server; here a slice is an all-reduce. There is no credit: slices are handed
// to the link one by one as it becomes free (as in_flight allows), which is the strictest priority.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "cost/problem.h"

namespace gradcast {

struct P3Options {
  int64_t slice_elements = 40'000;
};

// How many slices that makes.
double slice_count(const Problem& problem, int64_t slice_elements);

// Throws Error{kInvalidOption} for slices so small that there would be more than a million.
std::vector<Block> p3(const Problem& problem, const P3Options& options);

}  // namespace gradcast
