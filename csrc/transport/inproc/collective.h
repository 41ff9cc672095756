// The arithmetic of the in-process transport: one operation over the memory of all ranks.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "gradcast/inproc.h"
#include "gradcast/types.h"

namespace gradcast {

// One rank's part in an operation.
struct Contribution {
  HostBuffer buffer;
  std::span<const Range> ranges;
};

// Carries out the operation for all ranks at once. Sums are taken in the order of ranks, in the elements' own
// precision, so all ranks get the same bits. REQUIRES: all ranks have the same ranges, whole elements of the same type
// inside their buffers.
void run_collective(Op op, std::span<const Contribution> ranks);

}  // namespace gradcast
