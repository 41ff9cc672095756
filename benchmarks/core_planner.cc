// How long planning takes and how it grows: what a re-plan costs in the middle of training.
//
// Profiles: log-uniform sizes, alpha 1 % of compute, communication 1.5 times compute. "General" ones have a tenth of their
// ready times moved, so that no proof applies and the planner searches.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>

#include "gradcast/bound.h"
#include "gradcast/play.h"
#include "gradcast/policy.h"
#include "policy/forecast.h"
#include "problem.h"

namespace gradcast {
namespace {

constexpr double kForwardNs = 100e6;
constexpr double kBackwardNs = 200e6;

Profile make_profile(int64_t tensor_count, bool nested) {
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
    if (!nested && i % 10 == 0) {
      tensor.ready_ns = std::round(kBackwardNs * share());
    }
    total_bytes += tensor.bytes;
    profile.tensors.push_back(tensor);
  }
  const double compute_ns = kForwardNs + kBackwardNs;
  profile.link.all_reduce.pieces = {
      {kUnboundedBytes, 0.01 * compute_ns, 1.5 * compute_ns / static_cast<double>(total_bytes)}};
  return profile;
}

// forecast alone, on a problem that is built already.
void forecast_policy(benchmark::State& state, bool nested) {
  const Profile profile = make_profile(state.range(0), nested);
  const Problem problem = make_problem(profile, profile.link, Mode::kOverlap, 1);
  size_t block_count = 0;
  for (auto _ : state) {
    block_count = forecast(problem, {}).size();
    benchmark::DoNotOptimize(block_count);
  }
  state.counters["blocks"] = static_cast<double>(block_count);
}
BENCHMARK_CAPTURE(forecast_policy, nested, true)
    ->Arg(100)
    ->Arg(1'000)
    ->Arg(10'000)
    ->Arg(100'000)
    ->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(forecast_policy, general, false)->Arg(100)->Arg(1'000)->Arg(10'000)->Unit(benchmark::kMillisecond);

// A whole re-plan: profile checked, planned, plan checked, played, bounded.
void make_plan_whole(benchmark::State& state, const char* policy) {
  const Profile profile = make_profile(state.range(0), true);
  PolicyOptions options;
  options.policy = policy;
  for (auto _ : state) {
    benchmark::DoNotOptimize(make_plan(profile, profile.link, options));
  }
}
BENCHMARK_CAPTURE(make_plan_whole, forecast, "forecast")
    ->Arg(1'000)
    ->Arg(10'000)
    ->Arg(100'000)
    ->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(make_plan_whole, ddp, "ddp")->Arg(1'000)->Arg(100'000)->Unit(benchmark::kMicrosecond);

void play_ddp_plan(benchmark::State& state) {
  const Profile profile = make_profile(state.range(0), true);
  PolicyOptions options;
  options.policy = "ddp";
  const Plan plan = make_plan(profile, profile.link, options);
  const Problem problem = make_problem(profile, profile.link, Mode::kOverlap, 1);
  for (auto _ : state) {
    benchmark::DoNotOptimize(iteration_ns(problem, plan.blocks));
  }
}
BENCHMARK(play_ddp_plan)->Arg(1'000)->Arg(100'000)->Unit(benchmark::kMicrosecond);

void bound_nested(benchmark::State& state) {
  const Profile profile = make_profile(state.range(0), true);
  for (auto _ : state) {
    benchmark::DoNotOptimize(bound(profile, profile.link, {}));
  }
}
BENCHMARK(bound_nested)->Arg(1'000)->Arg(100'000)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace gradcast
