// Seeded random profiles and plans that an engine can follow: buffers of float32 and float64, tensors cut and joined
// anywhere between elements, several ranges in a block, some all-reduces split into a reduce-scatter and a later
// all-gather.
//
// Thread safety: pure; any thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "gradcast/plan.h"
#include "gradcast/profile.h"
#include "tests/core/profiles.h"
#include "tests/core/random_plans.h"

namespace gradcast {

// Buffers with an even number hold float32, the others float64.
inline int32_t element_bytes_of(int32_t buffer) {
  return buffer % 2 == 0 ? 4 : 8;
}

inline Profile random_tensors(Random& random) {
  const auto buffer_count = static_cast<int32_t>(random.integer(1, 3));
  const int64_t tensor_count = random.integer(1, 12);
  Profile profile;
  profile.name = "random";
  for (int64_t i = 0; i < tensor_count; ++i) {
    // The first tensors see to it that no buffer is left out.
    const auto buffer = static_cast<int32_t>(i < buffer_count ? i : random.integer(0, buffer_count - 1));
    const int32_t element_bytes = element_bytes_of(buffer);
    profile.tensors.push_back({"t" + std::to_string(i), element_bytes * random.integer(1, 40), buffer, element_bytes});
  }
  return profile;
}

// Splits some all-reduces into halves: the scatter in its place, the gather of the same ranges anywhere later.
inline void split_some(Random& random, Plan& plan) {
  for (size_t k = 0; k < plan.blocks.size(); ++k) {
    if (plan.blocks[k].op == Op::kAllReduce && random.chance(0.4)) {
      Block gather = plan.blocks[k];
      plan.blocks[k].op = Op::kReduceScatter;
      gather.op = Op::kAllGather;
      const int64_t place = random.integer(static_cast<int64_t>(k) + 1, static_cast<int64_t>(plan.blocks.size()));
      plan.blocks.insert(plan.blocks.begin() + place, gather);
    }
  }
}

inline Plan random_followable(Random& random, const Profile& profile, bool scatter_gather) {
  Plan plan = random_plan(random, profile, {.in_flight = static_cast<int32_t>(random.integer(1, 4))});
  if (scatter_gather) {
    split_some(random, plan);
  }
  return plan;
}

// 0 … count-1, shuffled.
inline std::vector<int32_t> random_order(Random& random, int32_t count) {
  std::vector<int32_t> order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  for (int32_t i = count - 1; i > 0; --i) {
    std::swap(order[i], order[random.integer(0, i)]);
  }
  return order;
}

}  // namespace gradcast
