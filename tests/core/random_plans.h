// Seeded random plans for tests: complete and valid, otherwise anything that a policy might send, from one block to
// many, of one range or several, cut anywhere between elements, in ready order or in none, all-reduced or scattered and
// gathered.
//
// Thread safety: pure; any thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "gradcast/plan.h"
#include "gradcast/profile.h"
#include "tests/core/profiles.h"

namespace gradcast {

struct RandomPlanOptions {
  Mode mode = Mode::kOverlap;
  int32_t in_flight = 1;
  bool scatter_gather = false;  // else all-reduce alone
  int32_t cut_count_max = 12;   // by buffer
};

namespace detail {

// What a buffer holds: where tensors begin, and each one's ready time.
struct BufferPlan {
  int64_t element_bytes = 1;
  std::vector<std::pair<Range, double>> tensors;
};

inline std::map<int32_t, BufferPlan> buffers_of(const Profile& profile) {
  std::map<int32_t, BufferPlan> buffers;
  for (const Tensor& tensor : profile.tensors) {
    BufferPlan& buffer = buffers[tensor.buffer];
    const int64_t lo_bytes = buffer.tensors.empty() ? 0 : buffer.tensors.back().first.hi_bytes;
    buffer.element_bytes = tensor.element_bytes;
    buffer.tensors.push_back({{lo_bytes, lo_bytes + tensor.bytes}, tensor.ready_ns});
  }
  return buffers;
}

// Cuts ranges of one buffer between elements, half of the time where a tensor begins.
inline std::vector<Range> cut_anew(Random& random, const BufferPlan& buffer, std::vector<Range> ranges,
                                   int64_t cut_count) {
  for (int64_t cut = 0; cut < cut_count; ++cut) {
    const size_t at = static_cast<size_t>(random.integer(0, static_cast<int64_t>(ranges.size()) - 1));
    const auto tensor = static_cast<size_t>(random.integer(0, static_cast<int64_t>(buffer.tensors.size()) - 1));
    const Range range = ranges[at];
    const int64_t cut_bytes = random.chance(0.5) ? buffer.tensors[tensor].first.lo_bytes
                                                 : random.integer(range.lo_bytes, range.hi_bytes) /
                                                       buffer.element_bytes * buffer.element_bytes;
    if (cut_bytes > range.lo_bytes && cut_bytes < range.hi_bytes) {
      ranges[at].hi_bytes = cut_bytes;
      ranges.push_back({cut_bytes, range.hi_bytes});
    }
  }
  return ranges;
}

// Puts ranges together into blocks, at random or as neighbours; adjacent ranges of a block become one.
inline std::vector<Block> group(Random& random, Op op, int32_t buffer, std::vector<Range> ranges) {
  std::sort(ranges.begin(), ranges.end(), [](Range a, Range b) { return a.lo_bytes < b.lo_bytes; });
  const auto count = static_cast<int64_t>(ranges.size());
  const int64_t block_count = random.integer(1, count);
  const bool neighbours = random.chance(0.5);
  std::map<int64_t, Block> blocks;
  for (int64_t i = 0; i < count; ++i) {
    Block& block = blocks[neighbours ? i * block_count / count : random.integer(0, block_count - 1)];
    block.op = op;
    block.buffer = buffer;
    if (!block.ranges.empty() && block.ranges.back().hi_bytes == ranges[i].lo_bytes) {
      block.ranges.back().hi_bytes = ranges[i].hi_bytes;
    } else {
      block.ranges.push_back(ranges[i]);
    }
  }
  std::vector<Block> result;
  for (auto& [key, block] : blocks) {
    result.push_back(std::move(block));
  }
  return result;
}

inline bool share_a_byte(const Block& a, const Block& b) {
  for (const Range& range : a.ranges) {
    for (const Range& other : b.ranges) {
      if (range.lo_bytes < other.hi_bytes && other.lo_bytes < range.hi_bytes) {
        return a.buffer == b.buffer;
      }
    }
  }
  return false;
}

inline double ready_ns_of(const BufferPlan& buffer, const Block& block) {
  double ready_ns = 0;
  for (const auto& [range, tensor_ready_ns] : buffer.tensors) {
    if (share_a_byte(block, {Op::kAllReduce, block.buffer, {range}, 0, 0, "", ""})) {
      ready_ns = std::max(ready_ns, tensor_ready_ns);
    }
  }
  return ready_ns;
}

}  // namespace detail

inline Plan random_plan(Random& random, const Profile& profile, const RandomPlanOptions& options) {
  const bool in_ready_order = random.chance(0.6);
  const double scattered_share = options.scatter_gather ? random.uniform(0, 1.5) : 0;
  std::vector<std::pair<double, Block>> keyed;
  for (const auto& [index, buffer] : detail::buffers_of(profile)) {
    const Range whole{0, buffer.tensors.back().first.hi_bytes};
    const auto cuts = [&] { return random.integer(0, options.cut_count_max); };
    const auto reduced =
        detail::group(random, Op::kAllReduce, index, detail::cut_anew(random, buffer, {whole}, cuts()));
    std::vector<Range> scattered;
    const size_t first = keyed.size();
    for (Block block : reduced) {
      if (random.chance(scattered_share)) {
        block.op = Op::kReduceScatter;
        scattered.insert(scattered.end(), block.ranges.begin(), block.ranges.end());
      }
      const double urge = random.uniform(0, in_ready_order ? 0.1 : 1) * profile.backward_ns;
      keyed.push_back({(in_ready_order ? detail::ready_ns_of(buffer, block) : 0) + urge, block});
    }
    if (scattered.empty()) {
      continue;
    }
    for (Block& gather :
         detail::group(random, Op::kAllGather, index, detail::cut_anew(random, buffer, scattered, cuts()))) {
      double key = 0;
      for (size_t i = first; i < keyed.size(); ++i) {
        if (keyed[i].second.op == Op::kReduceScatter && detail::share_a_byte(keyed[i].second, gather)) {
          key = std::max(key, keyed[i].first);
        }
      }
      keyed.push_back({key * (1 + random.uniform(0, 1)), gather});
    }
  }
  std::stable_sort(keyed.begin(), keyed.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  Plan plan;
  plan.policy = "random";
  plan.mode = options.mode;
  plan.in_flight = options.in_flight;
  for (auto& [key, block] : keyed) {
    plan.blocks.push_back(std::move(block));
  }
  return plan;
}

}  // namespace gradcast
