// dear: an all-reduce is a reduce-scatter and an all-gather; the first half runs under backward, the second under
// forward.
//
// Gradients are fused into groups in forward order. Each group's reduce-scatter starts when the group is complete;
// when the last one is through, the all-gathers follow in forward order, so each half is hidden behind one pass and
// the wire carries no byte more than an all-reduce would.
//
// Source: Zhang et al., "DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce Pipelining" (ICDCS
// 2023); dear_dopt.py and tuner.py of the authors' code.
//
// The paper tunes the fusion size by Bayesian optimization of the measured step time over 1 … 256 MB; the default 0
// takes the best of 1, 2, 4, … 256 MiB and the untuned 25 MiB by the predicted iteration time.
//
// Choices: tensors stand for modules. Groups never span buffers. The padding to a multiple of the world size is left
// out. The rule that no all-gather starts before backward has ended cannot be said in a plan, which has no start
// times; play starts the first one when the last reduce-scatter is through, which is earlier only where backward ends
// with work that has no gradient.
#include <algorithm>
#include <limits>
#include <string>

#include "policies/online.h"
#include "policies/published.h"

namespace gradcast {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kFusionsBytes[] = {256 * kMiB, 128 * kMiB, 64 * kMiB, 32 * kMiB, 25 * kMiB,
                                     16 * kMiB,  8 * kMiB,   4 * kMiB,  2 * kMiB,  1 * kMiB};

struct Group {
  int32_t buffer = 0;
  int32_t first_tensor = 0;  // its most urgent one
  Range range;
  double ready_ns = 0;
};

// Groups of neighbours in forward order, each closed before it would exceed fusion_bytes; a larger tensor is alone.
std::vector<Group> fused_groups(const Problem& problem, int64_t fusion_bytes) {
  const bool nested = is_nested(problem);
  const auto earlier = [&](int32_t a, int32_t b) { return problem.ready_ns[a] < problem.ready_ns[b]; };
  std::vector<Group> groups;
  for (int32_t buffer = 0; buffer < problem.buffer_count(); ++buffer) {
    const std::vector<int32_t>& tensors = problem.buffers[buffer].tensors;
    for (auto first = tensors.begin(); first != tensors.end();) {
      const int64_t lo_bytes = problem.offset_bytes[*first];
      const auto last = std::partition_point(first + 1, tensors.end(), [&](int32_t tensor) {
        return problem.range_of(tensor).hi_bytes - lo_bytes <= fusion_bytes;
      });
      const int32_t latest = nested ? *first : *std::max_element(first, last, earlier);
      const Range range{lo_bytes, problem.range_of(*(last - 1)).hi_bytes};
      groups.push_back({buffer, *first, range, problem.ready_ns[latest]});
      first = last;
    }
  }
  std::ranges::sort(groups, {}, &Group::first_tensor);
  return groups;
}

// Groups by the time at which they can be scattered; equal ones in backward's order.
std::vector<int32_t> by_group_ready(const std::vector<Group>& groups) {
  std::vector<int32_t> arrivals(groups.size());
  for (size_t i = 0; i < groups.size(); ++i) {
    arrivals[i] = static_cast<int32_t>(groups.size() - 1 - i);
  }
  std::stable_sort(arrivals.begin(), arrivals.end(),
                   [&](int32_t a, int32_t b) { return groups[a].ready_ns < groups[b].ready_ns; });
  return arrivals;
}

std::vector<Block> blocks_of(const std::vector<Group>& groups, const std::string& reason) {
  std::vector<Block> blocks;
  blocks.reserve(2 * groups.size());
  for (const int32_t group : by_group_ready(groups)) {
    blocks.push_back(Block{Op::kReduceScatter, groups[group].buffer, {groups[group].range}, 0, 0, reason});
  }
  for (const Group& group : groups) {
    blocks.push_back(Block{Op::kAllGather, group.buffer, {group.range}, 0, 0, reason});
  }
  return blocks;
}

// The time by play of blocks_of(groups), without walking the tensors: of a group only the first read matters.
double groups_iteration_ns(const Problem& problem, const std::vector<Group>& groups) {
  VirtualLink link(problem);
  std::vector<double> scattered_ns(groups.size());
  for (const int32_t group : by_group_ready(groups)) {
    const Group& scatter = groups[group];
    scattered_ns[group] = link.launch(scatter.ready_ns, scatter.range.size_bytes(), Op::kReduceScatter);
  }
  double iteration_ns = problem.backward_ns + problem.forward_ns;
  for (size_t group = 0; group < groups.size(); ++group) {
    const double arrival_ns = link.launch(scattered_ns[group], groups[group].range.size_bytes(), Op::kAllGather);
    const double need_ns = problem.need_ns[groups[group].first_tensor];
    iteration_ns = std::max(iteration_ns, arrival_ns + problem.forward_ns - need_ns);
  }
  return iteration_ns;
}

// The start-ups of so many groups and all bytes, one operation at a time: smaller groups are more of them, so from
// where this is above a known time on, no smaller fusion helps.
double link_ns_min(const Problem& problem, size_t group_count) {
  const LinkModel& link = problem.link;
  const double start_up_ns = link.reduce_scatter.alpha_ns_min() + link.all_gather.alpha_ns_min();
  const double per_byte_ns = link.reduce_scatter.beta_ns_per_byte_min() + link.all_gather.beta_ns_per_byte_min();
  const double start_ups = problem.in_flight == 1 ? static_cast<double>(group_count) : 0;
  return start_ups * start_up_ns + per_byte_ns * static_cast<double>(problem.total_bytes);
}

}  // namespace

std::vector<Block> dear(const Problem& problem, const DearOptions& options) {
  std::vector<Group> best;
  int64_t best_fusion_bytes = 0;
  double best_ns = std::numeric_limits<double>::infinity();
  for (const int64_t fusion_bytes : sizes_to_try(options.fusion_bytes, kFusionsBytes)) {
    const std::vector<Group> groups = fused_groups(problem, fusion_bytes);
    if (const double tried_ns = groups_iteration_ns(problem, groups); tried_ns < best_ns) {
      best_ns = tried_ns;
      best_fusion_bytes = fusion_bytes;
      best = groups;
    }
    if (link_ns_min(problem, groups.size()) > best_ns) {
      break;
    }
  }
  return blocks_of(best, "fusion " + bytes_text(best_fusion_bytes));
}

}  // namespace gradcast
