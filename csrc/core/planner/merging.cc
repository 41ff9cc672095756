#include "planner/merging.h"

#include <cstddef>
#include <utility>

#include "cost/pieces.h"

namespace gradcast {
namespace {

// Shares of what may be lost: a merge that costs much must not spend what many cheap ones would need.
constexpr double kShares[] = {0, 0.1, 0.25, 0.5, 1};

bool can_join(const Block& a, const Block& b) {
  return a.op == Op::kAllReduce && b.op == Op::kAllReduce && a.buffer == b.buffer;
}

Block joint(const Block& earlier, const Block& later) {
  Block block = later;  // it waits for what the later one waits for, so its reason holds
  block.ranges.insert(block.ranges.end(), earlier.ranges.begin(), earlier.ranges.end());
  block.ranges = joined(std::move(block.ranges));
  return block;
}

}  // namespace

std::vector<Block> merged(const Problem& problem, std::vector<Block> blocks, double allowed_ns, int64_t evaluations) {
  const double best_ns = iteration_ns(problem, blocks);
  for (const double share : kShares) {
    const double limit_ns = best_ns + share * (allowed_ns - best_ns);
    for (size_t i = 0; i + 1 < blocks.size() && evaluations > 0;) {
      if (!can_join(blocks[i], blocks[i + 1])) {
        ++i;
        continue;
      }
      --evaluations;
      Block earlier = std::exchange(blocks[i], joint(blocks[i], blocks[i + 1]));
      Block later = std::move(blocks[i + 1]);
      const auto place = blocks.begin() + static_cast<std::ptrdiff_t>(i);
      blocks.erase(place + 1);
      if (iteration_ns(problem, blocks) > limit_ns) {
        *place = std::move(earlier);
        blocks.insert(place + 1, std::move(later));
        ++i;
      }
    }
  }
  return blocks;
}

}  // namespace gradcast
