#include "policies/ddp.h"

#include <algorithm>
#include <string>
#include <utility>

#include "policies/online.h"

namespace gradcast {
namespace {

// One buffer's open bucket.
struct Bucket {
  std::vector<Range> ranges;
  int64_t size_bytes = 0;
  size_t last_arrival = 0;  // position of its latest tensor in ready order
  int64_t cap_bytes = 0;
};

Block closed(Bucket& bucket, int32_t buffer, const char* why) {
  Block block;
  block.buffer = buffer;
  block.reason = std::to_string(bucket.ranges.size()) + " tensors, " + bytes_text(bucket.size_bytes) + ": " + why;
  block.ranges = joined(std::move(bucket.ranges));
  bucket.ranges.clear();
  bucket.size_bytes = 0;
  return block;
}

// The buffers whose bucket is still open, by the time at which it is complete.
std::vector<int32_t> open_buffers(const std::vector<Bucket>& buckets) {
  std::vector<int32_t> buffers;
  for (size_t buffer = 0; buffer < buckets.size(); ++buffer) {
    if (!buckets[buffer].ranges.empty()) {
      buffers.push_back(static_cast<int32_t>(buffer));
    }
  }
  std::sort(buffers.begin(), buffers.end(),
            [&](int32_t a, int32_t b) { return buckets[a].last_arrival < buckets[b].last_arrival; });
  return buffers;
}

}  // namespace

std::vector<Block> ddp(const Problem& problem, const DdpOptions& options) {
  std::vector<Block> blocks;
  std::vector<Bucket> buckets(problem.buffer_bytes.size());
  for (Bucket& bucket : buckets) {
    bucket.cap_bytes = options.first_bytes;
  }
  const std::vector<int32_t> arrivals = by_ready(problem);
  for (size_t at = 0; at < arrivals.size(); ++at) {
    const int32_t tensor = arrivals[at];
    Bucket& bucket = buckets[problem.buffer[tensor]];
    bucket.ranges.push_back(problem.range_of(tensor));
    bucket.size_bytes += problem.bytes[tensor];
    bucket.last_arrival = at;
    if (bucket.size_bytes >= bucket.cap_bytes) {
      blocks.push_back(closed(bucket, problem.buffer[tensor], "the bucket's cap is reached"));
      bucket.cap_bytes = options.cap_bytes;
    }
  }
  for (const int32_t buffer : open_buffers(buckets)) {
    blocks.push_back(closed(buckets[buffer], buffer, "the last bucket"));
  }
  return blocks;
}

}  // namespace gradcast
