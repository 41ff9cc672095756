#include "policy/dear.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "policy/online.h"

namespace gradcast {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kFusionsMib[] = {256, 128, 64, 32, 25, 16, 8, 4, 2, 1};

struct Group {
  int32_t buffer = 0;
  int32_t first_tensor = 0;  // its most urgent one
  Range range;
  double ready_ns = 0;
};

// Groups of neighbours in forward order, each closed before it would exceed fusion_bytes; a larger tensor is alone.
std::vector<Group> fused_groups(const Problem& problem, int64_t fusion_bytes) {
  std::vector<Group> groups;
  for (int32_t buffer = 0; buffer < problem.buffer_count(); ++buffer) {
    bool open = false;
    for (const int32_t tensor : problem.buffer_tensors[buffer]) {
      const Range range = problem.range_of(tensor);
      if (!open || range.hi_bytes - groups.back().range.lo_bytes > fusion_bytes) {
        groups.push_back({buffer, tensor, range, 0});
        open = true;
      }
      groups.back().range.hi_bytes = range.hi_bytes;
      groups.back().ready_ns = std::max(groups.back().ready_ns, problem.ready_ns[tensor]);
    }
  }
  std::sort(groups.begin(), groups.end(),
            [](const Group& a, const Group& b) { return a.first_tensor < b.first_tensor; });
  return groups;
}

Block group_block(const Group& group, Op op, const std::string& reason) {
  Block block;
  block.op = op;
  block.buffer = group.buffer;
  block.ranges = {group.range};
  block.reason = reason;
  return block;
}

std::vector<Block> with_fusion(const Problem& problem, int64_t fusion_bytes) {
  const std::string reason = "fusion " + bytes_text(fusion_bytes);
  const std::vector<Group> groups = fused_groups(problem, fusion_bytes);
  std::vector<int32_t> arrivals(groups.size());
  for (size_t i = 0; i < groups.size(); ++i) {
    arrivals[i] = static_cast<int32_t>(groups.size() - 1 - i);
  }
  std::stable_sort(arrivals.begin(), arrivals.end(),
                   [&](int32_t a, int32_t b) { return groups[a].ready_ns < groups[b].ready_ns; });

  std::vector<Block> blocks;
  blocks.reserve(2 * groups.size());
  for (const int32_t group : arrivals) {
    blocks.push_back(group_block(groups[group], Op::kReduceScatter, reason));
  }
  for (const Group& group : groups) {
    blocks.push_back(group_block(group, Op::kAllGather, reason));
  }
  return blocks;
}

}  // namespace

std::vector<Block> dear(const Problem& problem, const DearOptions& options) {
  if (options.fusion_bytes > 0) {
    return with_fusion(problem, options.fusion_bytes);
  }
  std::vector<Block> best;
  double best_ns = std::numeric_limits<double>::infinity();
  for (const int64_t fusion_mib : kFusionsMib) {
    std::vector<Block> blocks = with_fusion(problem, fusion_mib * kMiB);
    if (const double tried_ns = iteration_ns(problem, blocks); tried_ns < best_ns) {
      best_ns = tried_ns;
      best = std::move(blocks);
    }
  }
  return best;
}

}  // namespace gradcast
