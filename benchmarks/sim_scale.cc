// What many simulated ranks cost: events per second, and memory, for the bundled ResNet-50 and two plans, the default policy's and
// one of many small blocks.
//
// The column `peak_MiB` is the most memory the process has held so far: run one benchmark alone (--benchmark_filter) for its own.
#include <benchmark/benchmark.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>

#include "gradcast/networks.h"
#include "gradcast/policy.h"
#include "tests/sim/simulator/simulate.h"

namespace gradcast {
namespace {

constexpr double kHopLatencyNs = 50e3;
constexpr double kHopBytesPerS = 1.25e9;

Profile resnet50(int32_t rank_count) {
  std::ifstream file(std::string(GRADCAST_DATA_DIR) + "/resnet50.json");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  Profile profile = profile_from_json(text);
  profile.link = tree_link({kHopLatencyNs, kHopBytesPerS}, rank_count);
  return profile;
}

// Every kind of disturbance, in sizes that a shared cluster has.
SimJitter usual_jitter() {
  SimJitter jitter;
  jitter.compute_share = 0.05;
  jitter.straggler_probability = 0.001;
  jitter.straggler_factor_max = 3;
  jitter.ready_ns_max = 2e6;
  jitter.link_share = 0.1;
  jitter.completion_ns_max = 200e3;
  jitter.late_probability = 1e-4;
  jitter.late_ns_max = 20e6;
  return jitter;
}

double peak_mib() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / 1024;
}

void BM_Simulate(benchmark::State& state, const std::string& policy) {
  SimScenario scenario;
  scenario.rank_count = static_cast<int32_t>(state.range(0));
  scenario.iteration_count = 3;
  scenario.profile = resnet50(scenario.rank_count);
  scenario.plans.push_back(make_plan(scenario.profile, scenario.profile.link, {.policy = policy}));
  scenario.jitter = usual_jitter();
  SimResult result;
  for (auto iteration : state) {
    result = simulate(scenario);
    if (std::ranges::any_of(result.ranks, [](const SimRankResult& rank) {
          return rank.outcome != SimRankResult::Outcome::kFinished;
        })) {
      throw std::runtime_error("the run did not come to its end");
    }
  }
  state.counters["events"] = static_cast<double>(result.event_count);
  state.counters["events/s"] =
      benchmark::Counter(static_cast<double>(result.event_count), benchmark::Counter::kIsIterationInvariantRate);
  state.counters["blocks"] = static_cast<double>(scenario.plans.front().blocks.size());
  state.counters["queue_peak"] = static_cast<double>(result.queue_peak);
  state.counters["peak_MiB"] = peak_mib();
}
BENCHMARK_CAPTURE(BM_Simulate, forecast, "forecast")->Arg(8)->Arg(1024)->Arg(16384)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_Simulate, p3, "p3")->Arg(8)->Arg(1024)->Arg(16384)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace gradcast
