// usbyte: blocks of unequal size: what one tensor sends without a break is one operation, as long as the time until
// the next gradient allows; a tensor that is nearly through is not interrupted.
//
// Phase 1 (backward): whenever the link is free before the next ready time, the tensor of the highest priority sends
// as many units as fit until then (at least one; rounded up), and where it goes on sending its block grows. Phase 2
// (after the last gradient): what is left of each tensor is one block, most urgent first. A local search then raises,
// one by one, the priority of tensors that others interrupted in phase 1, and keeps what shortens the iteration.
//
// Source: US-Byte (IEEE TPDS 2024), algorithms 1 to 3; algorithm1, algorithm3 of the authors' code
// (ZJU-CNLAB/US-Byte).
//
// Choices: where a block grows, its size is what fits between its own start and the next ready time, with one start-up
// cost (the code counts the units before the last growth only once). The search compares predicted iteration times
// with this library's rules. It makes at most as many trials as play two million tensors in all: profiles above 1,400
// tensors with many interruptions get a part of it. The model has one operation at a time, whatever in_flight is. The
// unit is ByteScheduler's tuned partition in the paper; the default 0 takes the best of the values listed in
// usbyte.cc, before the search.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "cost/problem.h"

namespace gradcast {

struct UsbyteOptions {
  int64_t unit_bytes = 0;  // 0: tuned
  bool search = true;      // algorithm 3
};

std::vector<Block> usbyte(const Problem& problem, const UsbyteOptions& options);

}  // namespace gradcast
