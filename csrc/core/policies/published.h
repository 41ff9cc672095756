// The published policies. The file of each begins with its rules, its source, and what was chosen where the source
// leaves a choice.
//
// Those that cut tensors throw Error{kInvalidOption} for sizes so small that there would be more than a million blocks.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cost/problem.h"

namespace gradcast {

struct NoOptions {};

std::vector<Block> fifo(const Problem& problem, const NoOptions& options);
std::vector<Block> mgwfbp(const Problem& problem, const NoOptions& options);
std::vector<Block> fsdp(const Problem& problem, const NoOptions& options);

struct P3Options {
  int64_t slice_elements = 40'000;
};
std::vector<Block> p3(const Problem& problem, const P3Options& options);
// The number of slices.
double slice_count(const Problem& problem, int64_t slice_elements);

struct ByteschedulerOptions {
  int64_t partition_bytes = 0;  // 0: tuned
  int64_t credit_bytes = 0;     // 0: tuned
};
std::vector<Block> bytescheduler(const Problem& problem, const ByteschedulerOptions& options);

struct DdpOptions {
  int64_t first_bytes = int64_t{1} << 20;  // dist._DEFAULT_FIRST_BUCKET_BYTES
  int64_t cap_bytes = int64_t{25} << 20;   // bucket_cap_mb=25
};
std::vector<Block> ddp(const Problem& problem, const DdpOptions& options);

struct ProphetOptions {
  int64_t partition_bytes = 4'096'000;  // BYTEPS_PARTITION_BYTES
  int64_t credit_bytes = 0;             // 0: tuned; below a partition: every partition is an operation of its own
  double gap_factor = 2;                // of the mean gap, above which a gap ends a burst
};
std::vector<Block> prophet(const Problem& problem, const ProphetOptions& options);
// The bursts of gradients, as positions in `arrivals` (by_ready's order) at which a burst begins; the first is 0.
std::vector<int32_t> burst_starts(const Problem& problem, std::span<const int32_t> arrivals, double gap_factor);

struct DearOptions {
  int64_t fusion_bytes = 0;  // 0: tuned
};
// REQUIRES: the link knows reduce_scatter and all_gather; overlap mode.
std::vector<Block> dear(const Problem& problem, const DearOptions& options);

struct UsbyteOptions {
  int64_t unit_bytes = 0;  // 0: tuned
  bool search = true;      // algorithm 3
};
std::vector<Block> usbyte(const Problem& problem, const UsbyteOptions& options);

struct DcreditOptions {
  int64_t unit_bytes = 0;  // 0: tuned
};
std::vector<Block> dcredit(const Problem& problem, const DcreditOptions& options);

}  // namespace gradcast
