// dear: an all-reduce is a reduce-scatter and an all-gather; the first half runs under backward, the second under
// forward.
//
// Gradients are fused into groups in forward order. Each group's reduce-scatter starts when the group is complete;
// when the last one is through, the all-gathers follow in forward order, so each half is hidden behind one pass and
// the wire carries no byte more than an all-reduce would.
//
// Source: Zhang et al., "DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce Pipelining" (ICDCS
// 2023); dear_dopt.py and tuner.py of the authors' code.
//
// The paper tunes the fusion size by Bayesian optimization of the measured step time over 1 … 256 MB; the default 0
// takes the best of 1, 2, 4, … 256 MiB and the untuned 25 MiB by the predicted iteration time.
//
// Choices: tensors stand for modules. Groups never span buffers. The padding to a multiple of the world size is left
// out. The rule that no all-gather starts before backward has ended cannot be said in a plan, which has no start
// times; play starts the first one when the last reduce-scatter is through, which is earlier only where backward ends
// with work that has no gradient.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "cost/problem.h"

namespace gradcast {

struct DearOptions {
  int64_t fusion_bytes = 0;  // 0: tuned
};

// REQUIRES: the link knows reduce_scatter and all_gather; overlap mode.
std::vector<Block> dear(const Problem& problem, const DearOptions& options);

}  // namespace gradcast
