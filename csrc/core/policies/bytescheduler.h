// bytescheduler: tensors are cut into chunks, chunks wait in a priority queue, and a credit says how many bytes may be
// handed to the link before the first of them has come back.
//
// A chunk's priority is its tensor's urgency, then its place in the tensor. The order of a chunk is fixed when it is
// handed over, so a large credit keeps the link busy and a small one lets urgent chunks overtake.
//
// Source: Peng et al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration" (SOSP 2019);
// rules and defaults of the authors' code: a chunk goes while the credit is above 0, so the credit may fall below 0 by
// one chunk; a finished chunk gives its bytes back.
//
// The paper tunes both sizes by Bayesian optimization of the measured step time, over credits of 4 to 64 million and
// partitions of 2 to 32 million parameters; untuned it takes 4 and 1 million. Here the tuner is a search over a grid,
// with the predicted iteration time: the powers of two of that space with 4 bytes per parameter (credits 16, 32, … 256
// MB; partitions 8, 16, … 128 MB) and the untuned values. On a tie the larger partition wins, then the smaller credit.
//
// Choices: an operation is an all-reduce. The credit decides only when the order becomes fixed; the link serves the
// chunks in that order, in_flight at a time.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "cost/problem.h"

namespace gradcast {

struct ByteschedulerOptions {
  int64_t partition_bytes = 0;  // 0: tuned
  int64_t credit_bytes = 0;     // 0: tuned
};

// Throws Error{kInvalidOption} for partitions so small that there would be more than a million.
std::vector<Block> bytescheduler(const Problem& problem, const ByteschedulerOptions& options);

}  // namespace gradcast
