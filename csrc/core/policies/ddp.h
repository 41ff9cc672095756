// ddp: the buckets of PyTorch's DistributedDataParallel, as they are after the rebuild at the end of the first
// iteration.
//
// Whole tensors are put into buckets in the order in which their gradients became ready; a bucket closes as soon as
// its size reaches its cap, so it may exceed the cap and a large tensor is never split. Each buffer (dtype and device)
// fills buckets of its own, the first one up to `first_bytes`, the others up to `cap_bytes`.
//
// Source: Li et al., "PyTorch Distributed" (VLDB 2020); torch/csrc/distributed/c10d/reducer.cpp,
// compute_bucket_assignment_by_size and rebuild_buckets.
//
// Launch order is bucket index order, strictly. Torch numbers the rebuilt buckets in the order in which they close;
// those that never reach their cap come last, in the order of a hash table. Chosen here for them: the earlier complete
// first, which is the best of the orders that torch may give. Not modelled: torch lays a bucket's bytes out in ready
// order, so it never packs. Here a bucket whose tensors are not neighbours in the buffer has several ranges, and pays
// for packing if the link says that packing costs anything.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "cost/problem.h"

namespace gradcast {

struct DdpOptions {
  int64_t first_bytes = int64_t{1} << 20;  // dist._DEFAULT_FIRST_BUCKET_BYTES
  int64_t cap_bytes = int64_t{25} << 20;   // bucket_cap_mb=25
};

std::vector<Block> ddp(const Problem& problem, const DdpOptions& options);

}  // namespace gradcast
