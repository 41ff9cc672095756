// fifo: one all-reduce per tensor, in the order in which the gradients become ready (wait-free backpropagation).
//
// Communication overlaps backward as soon as the first gradient exists; the most urgent gradients go last, and every
// small tensor pays a start-up cost of its own.
//
// Source: Zhang et al., "Poseidon" (USENIX ATC 2017); "WFBP" in the papers that compare with it.
//
// Thread safety: pure; any thread.
#pragma once

#include <vector>

#include "cost/problem.h"

namespace gradcast {

struct FifoOptions {};

std::vector<Block> fifo(const Problem& problem, const FifoOptions& options);

}  // namespace gradcast
