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
#include <algorithm>
#include <string>

#include "policies/online.h"
#include "policies/published.h"

namespace gradcast {
namespace {

// One buffer's open bucket.
struct Bucket {
  std::vector<Piece> pieces;  // in ready order
  int64_t size_bytes = 0;
  size_t last_arrival = 0;  // position of its latest tensor in ready order
  int64_t cap_bytes = 0;
};

Block closed(const Problem& problem, Bucket& bucket, const char* why) {
  const std::string reason =
      std::to_string(bucket.pieces.size()) + " tensors, " + bytes_text(bucket.size_bytes) + ": " + why;
  Block block = joint_blocks(problem, bucket.pieces, reason).front();
  bucket.pieces.clear();
  bucket.size_bytes = 0;
  return block;
}

}  // namespace

std::vector<Block> ddp(const Problem& problem, const DdpOptions& options) {
  std::vector<Block> blocks;
  std::vector<Bucket> buckets(problem.buffers.size());
  for (Bucket& bucket : buckets) {
    bucket.cap_bytes = options.first_bytes;
  }
  const std::vector<int32_t> arrivals = by_ready(problem);
  for (size_t at = 0; at < arrivals.size(); ++at) {
    const int32_t tensor = arrivals[at];
    Bucket& bucket = buckets[problem.buffer[tensor]];
    bucket.pieces.push_back({tensor, 0, problem.bytes[tensor]});
    bucket.size_bytes += problem.bytes[tensor];
    bucket.last_arrival = at;
    if (bucket.size_bytes >= bucket.cap_bytes) {
      blocks.push_back(closed(problem, bucket, "the bucket's cap is reached"));
      bucket.cap_bytes = options.cap_bytes;
    }
  }
  std::erase_if(buckets, [](const Bucket& bucket) { return bucket.pieces.empty(); });
  std::ranges::sort(buckets, {}, &Bucket::last_arrival);  // by the time at which each is complete
  for (Bucket& bucket : buckets) {
    blocks.push_back(closed(problem, bucket, "the last bucket"));
  }
  return blocks;
}

}  // namespace gradcast
