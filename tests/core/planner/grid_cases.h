// Seeded tiny profiles for exhaustive search: 1 to 5 tensors, 3 to 30 units of 8 bytes in all, times that often tie,
// start-up costs from nothing to more than backward.
//
// Thread safety: pure; any thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tests/core/planner/exhaustive.h"
#include "tests/core/profiles.h"

namespace gradcast {

// A multiple of every element size that random_profile gives out.
inline constexpr int64_t kGridUnitBytes = 8;

struct GridCaseOptions {
  RandomProfileOptions::Windows windows = RandomProfileOptions::Windows::kNested;
  int32_t tensor_count_max = 5;
  int32_t unit_count_max = 30;
  int32_t buffer_count = 1;
  int32_t link_piece_count = 1;
  bool updates = false;
  bool packing = false;
};

// A profile with its link. The link knows no other kind of operation than all-reduce.
inline Profile grid_case(uint64_t seed, const GridCaseOptions& options) {
  Random random(seed ^ 0x9e3779b97f4a7c15);
  RandomProfileOptions profile_options;
  profile_options.windows = options.windows;
  profile_options.tensor_count_max = options.tensor_count_max;
  profile_options.buffer_count = options.buffer_count;
  profile_options.updates = options.updates;
  Profile profile = random_profile(seed, profile_options);

  // Units in random proportions: from even ones to one tensor that holds nearly everything.
  const auto count = static_cast<int64_t>(profile.tensors.size());
  const int64_t unit_count = random.integer(std::max<int64_t>(3, count), options.unit_count_max);
  std::vector<double> weights(profile.tensors.size());
  double weight = 0;
  for (double& w : weights) {
    weight += w = random.log_uniform(0.05, 1);
  }
  for (size_t i = 0; i < profile.tensors.size(); ++i) {
    const double share = weights[i] / weight;
    profile.tensors[i].bytes =
        kGridUnitBytes * (1 + static_cast<int64_t>(share * static_cast<double>(unit_count - count)));
  }

  const double backward_ns = profile.backward_ns;
  const double alpha_ns = random.chance(0.1) ? 0 : random.log_uniform(1e-3, 1.2) * backward_ns;
  const double all_bytes_ns = random.log_uniform(0.1, 5) * (backward_ns + profile.forward_ns);
  const int64_t total_bytes = kGridUnitBytes * unit_count;
  profile.link = {};
  profile.link.all_reduce = detail::random_cost(random, alpha_ns, all_bytes_ns / static_cast<double>(total_bytes),
                                                options.link_piece_count, total_bytes);
  if (options.packing) {
    profile.link.pack_ns_per_byte = random.uniform(0, 0.5) * all_bytes_ns / static_cast<double>(total_bytes);
  }
  return profile;
}

}  // namespace gradcast
