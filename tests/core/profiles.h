// Seeded random profiles for tests: the same seed and options give the same profile everywhere.
//
// They cover what the planner must survive: windows that nest, almost nest, or do not; tied times; sizes over many
// orders of magnitude; start-up costs from nothing to more than backward; several buffers and piecewise links.
//
// Thread safety: pure; any thread.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "gradcast/link.h"
#include "gradcast/profile.h"

namespace gradcast {

// Numbers from a seed. The distributions of the standard library differ between its implementations, the engine does
// not.
class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  // In [lo, hi).
  double uniform(double lo, double hi) { return lo + (hi - lo) * static_cast<double>(engine_() >> 11) * 0x1p-53; }
  double log_uniform(double lo, double hi) { return lo * std::pow(hi / lo, uniform(0, 1)); }
  // In lo … hi, both included.
  int64_t integer(int64_t lo, int64_t hi) {
    return lo + static_cast<int64_t>(uniform(0, 1) * static_cast<double>(hi - lo + 1));
  }
  bool chance(double probability) { return uniform(0, 1) < probability; }

 private:
  std::mt19937_64 engine_;
};

struct RandomProfileOptions {
  enum class Windows {
    kNested,     // backward visits the tensors in the reverse of forward's order
    kDisturbed,  // nested, then every time moved by up to `disturbance` of its pass
    kRandom,     // ready and need have nothing to do with each other
  };
  Windows windows = Windows::kNested;
  double disturbance = 0.2;
  int32_t tensor_count_min = 1;
  int32_t tensor_count_max = 12;
  int64_t bytes_min = 1;  // sizes are log-uniform, then rounded up to whole elements
  int64_t bytes_max = 64'000'000;
  double tied_share = 0.2;  // of tensors that share ready, and as often need, with their neighbour
  int32_t buffer_count = 1;
  int32_t link_piece_count = 1;
  double pack_share = 0;       // cost of packing, as a share of the smallest beta
  bool updates = false;        // the optimizer takes time
  bool scatter_gather = true;  // the link knows reduce_scatter and all_gather
};

namespace detail {

// Times of one pass over the tensors, ascending, whole nanoseconds; `share` of neighbours at the same time.
inline std::vector<double> ascending_times(Random& random, size_t count, double end_ns, double tied_share) {
  std::vector<double> times_ns(count);
  for (double& time_ns : times_ns) {
    time_ns = std::floor(random.uniform(0, end_ns + 1));
  }
  std::sort(times_ns.begin(), times_ns.end());
  for (size_t i = 1; i < count; ++i) {
    if (random.chance(tied_share)) {
      times_ns[i] = times_ns[i - 1];
    }
  }
  return times_ns;
}

inline double disturbed(Random& random, double time_ns, double end_ns, double disturbance) {
  return std::clamp(std::round(time_ns + random.uniform(-disturbance, disturbance) * end_ns), 0.0, end_ns);
}

// Pieces from small to large sizes; alpha is raised where the cost would fall at a breakpoint.
inline OpCost random_cost(Random& random, double alpha_ns, double beta_ns_per_byte, int32_t piece_count,
                          int64_t total_bytes) {
  OpCost cost;
  for (int32_t i = 0; i < piece_count; ++i) {
    const double bend = piece_count == 1 ? 0 : 1;
    LinkPiece piece{kUnboundedBytes, alpha_ns * std::pow(4, bend * random.uniform(-1, 1)),
                    beta_ns_per_byte * std::pow(4, bend * random.uniform(-1, 1))};
    int64_t begin_bytes = 0;
    if (i > 0) {
      const LinkPiece& left = cost.pieces.back();
      begin_bytes = left.up_to_bytes;
      const auto begin = static_cast<double>(begin_bytes);
      piece.alpha_ns =
          std::max(piece.alpha_ns, left.alpha_ns + (left.beta_ns_per_byte - piece.beta_ns_per_byte) * begin);
    }
    if (i + 1 < piece_count) {
      piece.up_to_bytes =
          begin_bytes + 1 + static_cast<int64_t>(random.log_uniform(1, static_cast<double>(total_bytes)));
    }
    cost.pieces.push_back(piece);
  }
  return cost;
}

inline void add_random_tensors(Random& random, const RandomProfileOptions& options, Profile& profile) {
  using Windows = RandomProfileOptions::Windows;
  const auto count = static_cast<size_t>(random.integer(options.tensor_count_min, options.tensor_count_max));
  std::vector<double> ready_ns = ascending_times(random, count, profile.backward_ns, options.tied_share);
  std::vector<double> need_ns = ascending_times(random, count, profile.forward_ns, options.tied_share);
  std::reverse(ready_ns.begin(), ready_ns.end());
  if (random.chance(0.7)) {
    ready_ns.front() =
        profile.backward_ns;  // as in most models; the others end backward with work that has no gradient
    need_ns.front() = 0;
  }
  constexpr int32_t kElementBytes[] = {4, 2, 8, 1};
  for (size_t i = 0; i < count; ++i) {
    Tensor tensor;
    tensor.buffer = static_cast<int32_t>(random.integer(0, options.buffer_count - 1)) % static_cast<int32_t>(count);
    tensor.element_bytes = kElementBytes[tensor.buffer % 4];
    const auto size_bytes = static_cast<int64_t>(
        random.log_uniform(static_cast<double>(options.bytes_min), static_cast<double>(options.bytes_max) + 1));
    tensor.bytes = (size_bytes + tensor.element_bytes - 1) / tensor.element_bytes * tensor.element_bytes;
    tensor.ready_ns = ready_ns[i];
    tensor.need_ns = need_ns[i];
    if (options.windows == Windows::kDisturbed) {
      tensor.ready_ns = disturbed(random, ready_ns[i], profile.backward_ns, options.disturbance);
      tensor.need_ns = disturbed(random, need_ns[i], profile.forward_ns, options.disturbance);
    } else if (options.windows == Windows::kRandom) {
      tensor.ready_ns = std::floor(random.uniform(0, profile.backward_ns + 1));
    }
    if (options.updates && random.chance(0.7)) {
      tensor.update_ns = std::floor(random.uniform(0, 0.2 * profile.forward_ns / static_cast<double>(count)));
    }
    profile.tensors.push_back(tensor);
  }
}

inline void add_random_link(Random& random, const RandomProfileOptions& options, Profile& profile) {
  int64_t total_bytes = 0;
  for (const Tensor& tensor : profile.tensors) {
    total_bytes += tensor.bytes;
  }
  const double communication = random.log_uniform(0.1, 5);
  const double beta = communication * (profile.forward_ns + profile.backward_ns) / static_cast<double>(total_bytes);
  const double alpha_ns = random.chance(0.125) ? 0 : random.log_uniform(1e-5, 1.5) * profile.backward_ns;
  const auto cost = [&](double factor) {
    return random_cost(random, factor * alpha_ns, factor * beta, options.link_piece_count, total_bytes);
  };
  profile.link.all_reduce = cost(1);
  profile.link.pack_ns_per_byte = options.pack_share * profile.link.all_reduce.beta_ns_per_byte_min();
  if (options.scatter_gather) {
    profile.link.reduce_scatter = cost(random.uniform(0.3, 1.5));
    profile.link.all_gather = cost(random.uniform(0.3, 1.5));
  }
}

}  // namespace detail

inline Profile random_profile(uint64_t seed, const RandomProfileOptions& options) {
  Random random(seed);
  Profile profile;
  profile.name = "random " + std::to_string(seed);
  profile.world_size = 8;
  profile.backward_ns = std::round(random.log_uniform(1e5, 1e9));
  profile.forward_ns = std::round(profile.backward_ns * random.uniform(0.2, 1.2));
  detail::add_random_tensors(random, options, profile);
  // Disturbed and tied needs are brought into the order that a profile has.
  std::stable_sort(profile.tensors.begin(), profile.tensors.end(),
                   [](const Tensor& a, const Tensor& b) { return a.need_ns < b.need_ns; });
  sort_by_urgency(profile);
  for (size_t i = 0; i < profile.tensors.size(); ++i) {
    profile.tensors[i].name = "t" + std::to_string(i);
  }
  detail::add_random_link(random, options, profile);
  return profile;
}

}  // namespace gradcast
