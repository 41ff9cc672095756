// How long planning takes and how it grows: what a re-plan costs in the middle of training.
//
// Profiles: log-uniform sizes, alpha 1 % of compute, communication 1.5 times compute. Where windows are not nested, or the cost
// is bent (two pieces), no proof applies and the planner searches.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "cost/problem.h"
#include "gradcast/bound.h"
#include "gradcast/play.h"
#include "gradcast/policy.h"
#include "planner/forecast.h"
#include "planner/window_chains.h"

namespace gradcast {
namespace {

constexpr double kForwardNs = 100e6;
constexpr double kBackwardNs = 200e6;

enum class Windows {
  kNested,
  kNoisy,     // every ready time moved by up to 1 % of backward, as a measurement might
  kOutliers,  // every tenth ready time is anywhere in backward
};

struct Kind {
  Windows windows = Windows::kNested;
  bool scatter_gather = false;  // the link knows all three operations, as every formula network does
  int piece_count = 1;
};

Profile make_profile(int64_t tensor_count, Kind kind) {
  std::mt19937_64 random(1);
  const auto share = [&] { return static_cast<double>(random() >> 11) * 0x1p-53; };
  Profile profile;
  profile.name = "benchmark";
  profile.world_size = 8;
  profile.forward_ns = kForwardNs;
  profile.backward_ns = kBackwardNs;
  int64_t total_bytes = 0;
  for (int64_t i = 0; i < tensor_count; ++i) {
    const double at = static_cast<double>(i) / static_cast<double>(tensor_count);
    Tensor tensor;
    tensor.name = "layer" + std::to_string(i) + ".weight";
    tensor.bytes = 4 * static_cast<int64_t>(std::exp2(8 + 14 * share()));
    tensor.need_ns = std::round(kForwardNs * at);
    tensor.ready_ns = std::round(kBackwardNs * (1 - at));
    if (kind.windows == Windows::kNoisy) {
      tensor.ready_ns =
          std::clamp(std::round(tensor.ready_ns + 0.01 * kBackwardNs * (2 * share() - 1)), 0.0, kBackwardNs);
    } else if (kind.windows == Windows::kOutliers && i % 10 == 0) {
      tensor.ready_ns = std::round(kBackwardNs * share());
    }
    total_bytes += tensor.bytes;
    profile.tensors.push_back(tensor);
  }
  const double compute_ns = kForwardNs + kBackwardNs;
  const double alpha_ns = 0.01 * compute_ns;
  const double beta_ns_per_byte = 1.5 * compute_ns / static_cast<double>(total_bytes);
  profile.link.all_reduce.pieces = {{kUnboundedBytes, alpha_ns, beta_ns_per_byte}};
  if (kind.scatter_gather) {
    profile.link.reduce_scatter.pieces = {{kUnboundedBytes, alpha_ns / 2, beta_ns_per_byte / 2}};
    profile.link.all_gather = profile.link.reduce_scatter;
  }
  if (kind.piece_count > 1) {
    // Small operations start faster and run slower, as protocols for small sizes do.
    const int64_t break_bytes = total_bytes / 50;
    const double bend_ns = 0.5 * beta_ns_per_byte * static_cast<double>(break_bytes);
    profile.link.all_reduce.pieces = {{break_bytes, alpha_ns / 2, 1.4 * beta_ns_per_byte},
                                      {kUnboundedBytes, alpha_ns / 2 + bend_ns, beta_ns_per_byte}};
  }
  return profile;
}

// forecast alone, on a problem that is built already; how far its plan is from the bound is shown beside the time.
void forecast_policy(benchmark::State& state, Kind kind) {
  const Profile profile = make_profile(state.range(0), kind);
  const Problem problem = make_problem(profile, profile.link, Mode::kOverlap, 1);
  std::vector<Block> blocks;
  for (auto _ : state) {
    blocks = forecast(problem, {});
    benchmark::DoNotOptimize(blocks.data());
  }
  const bool any_op = blocks[0].op != Op::kAllReduce;
  state.counters["blocks"] = static_cast<double>(blocks.size());
  state.counters["over_bound_percent"] = 100 * (iteration_ns(problem, blocks) / bound(problem, any_op).best_ns - 1);
}
template <int64_t kTensorsMax>
void of_sizes(benchmark::internal::Benchmark* each) {
  each->RangeMultiplier(10)->Range(100, kTensorsMax)->Unit(benchmark::kMillisecond);
}
BENCHMARK_CAPTURE(forecast_policy, nested, Kind{})->Apply(of_sizes<100'000>);
BENCHMARK_CAPTURE(forecast_policy, nested_all_operations, Kind{Windows::kNested, true})->Apply(of_sizes<100'000>);
BENCHMARK_CAPTURE(forecast_policy, noisy, Kind{Windows::kNoisy})->Apply(of_sizes<100'000>);
BENCHMARK_CAPTURE(forecast_policy, outliers, Kind{Windows::kOutliers})->Apply(of_sizes<10'000>);
BENCHMARK_CAPTURE(forecast_policy, nested_bent_cost, Kind{Windows::kNested, false, 2})->Apply(of_sizes<10'000>);

// A whole re-plan: profile checked, planned, plan checked, played, bounded.
void make_plan_whole(benchmark::State& state, const char* policy) {
  const Profile profile = make_profile(state.range(0), {Windows::kNested, true});
  PolicyOptions options;
  options.policy = policy;
  for (auto _ : state) {
    benchmark::DoNotOptimize(make_plan(profile, profile.link, options));
  }
}
BENCHMARK_CAPTURE(make_plan_whole, forecast, "forecast")->Arg(1'000)->Arg(100'000)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(make_plan_whole, ddp, "ddp")->Arg(1'000)->Arg(100'000)->Unit(benchmark::kMillisecond);

void play_ddp_plan(benchmark::State& state) {
  const Profile profile = make_profile(state.range(0), {});
  PolicyOptions options;
  options.policy = "ddp";
  const Plan plan = make_plan(profile, profile.link, options);
  const Problem problem = make_problem(profile, profile.link, Mode::kOverlap, 1);
  for (auto _ : state) {
    benchmark::DoNotOptimize(iteration_ns(problem, plan.blocks));
  }
}
BENCHMARK(play_ddp_plan)->Arg(1'000)->Arg(100'000)->Unit(benchmark::kMillisecond);

void bound_of(benchmark::State& state, Kind kind) {
  const Profile profile = make_profile(state.range(0), kind);
  const Problem problem = make_problem(profile, profile.link, Mode::kOverlap, 1);
  for (auto _ : state) {
    benchmark::DoNotOptimize(bound(problem, false));
  }
}
BENCHMARK_CAPTURE(bound_of, nested, Kind{})->Arg(1'000)->Arg(100'000)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(bound_of, noisy, Kind{Windows::kNoisy})->Arg(1'000)->Arg(100'000)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace gradcast
