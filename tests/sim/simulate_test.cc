// Runs by hand: what they cost, and that a seed is a run.
#include "tests/sim/simulator/simulate.h"

#include <gtest/gtest.h>

#include <vector>

#include "gradcast/error.h"
#include "gradcast/play.h"
#include "tests/sim/hand_scenarios.h"
#include "tests/sim/random_scenarios.h"
#include "tests/support/refusals.h"

namespace gradcast {
namespace {

SimScenario three_ranks() {
  return scenario_of(three_layers(), {layer_by_layer()}, 3, 2);
}

TEST(Simulate, WithoutJitterItIsPlay) {
  for (const Mode mode : {Mode::kOverlap, Mode::kHook}) {
    SimScenario scenario = three_ranks();
    scenario.plans.front().mode = mode;
    scenario.profile.tensors[1].update_ns = 3;
    const double played_ns = play(scenario.profile, scenario.profile.link, scenario.plans.front()).iteration_ns;
    EXPECT_EQ(simulate(scenario).iteration_end_ns, std::vector<double>({played_ns, 2 * played_ns}));
  }
}

TEST(Simulate, OneSeedIsOneRun) {
  for (const uint64_t seed : {1, 2, 3}) {
    const SimScenario scenario = random_scenario(seed).scenario;
    const SimResult first = simulate(scenario);
    const SimResult second = simulate(scenario);
    EXPECT_EQ(first.end_ns, second.end_ns);
    EXPECT_EQ(first.event_count, second.event_count);
    ASSERT_EQ(first.ranks.size(), second.ranks.size());
    for (size_t i = 0; i < first.ranks.size(); ++i) {
      EXPECT_EQ(first.ranks[i].finish_ns, second.ranks[i].finish_ns);
      EXPECT_EQ(first.ranks[i].launches, second.ranks[i].launches);
    }
  }
}

TEST(Simulate, RefusesAPlanWhoseOperationsTheLinkDoesNotKnow) {
  SimScenario scenario = three_ranks();
  scenario.plans[0] = plan_of({block_of({{0, 60}}, Op::kReduceScatter), block_of({{0, 60}}, Op::kAllGather)});
  expect_refused([&] { simulate(scenario); }, ErrorCode::kInvalidLink,
                 "reduce_scatter, which the profile's link does not know");
}

}  // namespace
}  // namespace gradcast
