#include "planner/whole_tensors.h"

#include <algorithm>
#include <string>

#include "cost/pieces.h"
#include "gradcast/error.h"
#include "planner/bisect.h"

namespace gradcast {
namespace {

// Positions [first, last) in ready order.
struct Bucket {
  size_t first;
  size_t last;
};

// Buckets in time order that all end by `end_ns`; none if that cannot be.
std::vector<Bucket> fill(const Problem& problem, const std::vector<int32_t>& order, double end_ns) {
  std::vector<Bucket> buckets;
  size_t last = order.size();
  while (last > 0) {
    const double ready_ns = problem.ready_ns[order[last - 1]];
    const int32_t buffer = problem.buffer[order[last - 1]];
    size_t first = last;
    int64_t size_bytes = 0;
    double cost_ns = 0;
    while (first > 0 && problem.buffer[order[first - 1]] == buffer) {
      const int64_t grown_bytes = size_bytes + problem.bytes[order[first - 1]];
      const double grown_ns = problem.link.all_reduce.cost_ns(grown_bytes);
      if (ready_ns + grown_ns > end_ns) {
        break;
      }
      size_bytes = grown_bytes;
      cost_ns = grown_ns;
      --first;
    }
    if (first == last) {
      return {};
    }
    buckets.push_back({first, last});
    end_ns -= cost_ns;
    last = first;
  }
  std::reverse(buckets.begin(), buckets.end());
  return buckets;
}

Block block_of(const Problem& problem, const std::vector<int32_t>& order, const Bucket& bucket) {
  std::vector<Range> ranges;
  for (size_t at = bucket.first; at < bucket.last; ++at) {
    ranges.push_back(problem.range_of(order[at]));
  }
  Block block;
  block.buffer = problem.buffer[order[bucket.first]];
  block.ranges = joined(std::move(ranges));
  block.reason = "whole tensors in ready order: " + std::to_string(bucket.last - bucket.first);
  return block;
}

}  // namespace

std::vector<Block> whole_tensor_blocks(const Problem& problem) {
  GC_CHECK(problem.mode == Mode::kHook);
  const std::vector<int32_t> order = by_ready(problem);
  // A bucket per tensor, one after another, ends here at the latest.
  double high_ns = problem.backward_ns;
  for (const int32_t tensor : order) {
    high_ns += problem.link.all_reduce.cost_ns(problem.bytes[tensor]);
  }
  const Bracket end_ns = bisect(0, high_ns, [&](double ns) { return !fill(problem, order, ns).empty(); });
  std::vector<Block> blocks;
  for (const Bucket& bucket : fill(problem, order, end_ns.accepted)) {
    blocks.push_back(block_of(problem, order, bucket));
  }
  return blocks;
}

}  // namespace gradcast
