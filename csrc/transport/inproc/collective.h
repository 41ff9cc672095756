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

// What one rank brings into an operation.
struct Contribution {
  HostBuffer buffer;
  std::span<const Range> ranges;
};

// Does the operation for all ranks at once; `ranks` is by rank. REQUIRES: every rank brings the same ranges, whole elements
// inside its buffer, of the same kind.
void run_collective(Op op, std::span<const Contribution> ranks);

}  // namespace gradcast
