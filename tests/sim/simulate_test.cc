// Runs by hand: what they cost, and what stands still and what is said about it.
#include "tests/sim/simulator/simulate.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "gradcast/error.h"
#include "gradcast/play.h"
#include "tests/sim/hand_scenarios.h"
#include "tests/sim/random_scenarios.h"
#include "tests/support/refusals.h"

namespace gradcast {
namespace {

using Kind = SimFault::Kind;
using Outcome = SimRankResult::Outcome;
using Wait = SimStandstill::Wait;

SimScenario three_ranks(int32_t iteration_count = 2) {
  return scenario_of(three_layers(), {layer_by_layer()}, 3, iteration_count);
}

SimResult run_with(SimScenario scenario, const SimFault& fault) {
  scenario.faults.push_back(fault);
  return simulate(scenario);
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

TEST(Simulate, ALostGradientIsNamedByItsRankAndTheRankByTheOthers) {
  const SimResult result = run_with(three_ranks(), {Kind::kLoseReady, 1, 1, 1, 0});
  EXPECT_FALSE(result.finding);
  ASSERT_EQ(result.standstills.size(), 3U);
  EXPECT_EQ(result.standstills[0].text, "rank 0, iteration 1: block 2 of 3 (t1, 20 B) waits for rank 1");
  EXPECT_EQ(result.standstills[1].text, "rank 1, iteration 1: block 2 of 3 (t1, 20 B) waits for the gradient of t1");
  EXPECT_EQ(result.standstills[2].missing_ranks, std::vector<int32_t>{1});
  EXPECT_EQ(result.iteration_end_ns.size(), 1U);
}

TEST(Simulate, ALostEndIsNamedByItsRank) {
  const SimResult result = run_with(three_ranks(1), {Kind::kLoseCompletion, 2, 0, 0, 0});
  ASSERT_EQ(result.standstills.size(), 3U);
  EXPECT_EQ(result.standstills[2].wait, Wait::kCompletion);
  EXPECT_EQ(result.standstills[2].text,
            "rank 2, iteration 0: block 1 of 3 (t2, 30 B) has ended, and this rank was not told");
  EXPECT_EQ(result.standstills[0].text, "rank 0, iteration 0: block 2 of 3 (t1, 20 B) waits for rank 2");
}

TEST(Simulate, AGoneRankIsNamedByAllOthers) {
  // At 80 ns the second block, of 25 ns, is on the network since 70 ns: it fails with the rank.
  const SimResult result = run_with(three_ranks(), {Kind::kLeave, 0, 0, 0, 80});
  EXPECT_EQ(result.ranks[0].outcome, Outcome::kLeft);
  ASSERT_EQ(result.standstills.size(), 2U);
  for (const SimStandstill& still : result.standstills) {
    EXPECT_EQ(still.text, "rank " + std::to_string(still.rank) +
                              ", iteration 0: block 2 of 3 (t1, 20 B) waits for rank 0, which has left");
  }
}

TEST(Simulate, ManyMissingRanksAreCounted) {
  SimScenario scenario = scenario_of(three_layers(), {layer_by_layer()}, 12, 1);
  for (int32_t rank = 1; rank < 12; ++rank) {
    scenario.faults.push_back({Kind::kLeave, rank, 0, 0, 10});
  }
  const SimResult result = simulate(scenario);
  ASSERT_EQ(result.standstills.size(), 1U);
  EXPECT_EQ(result.standstills[0].missing_count, 11);
  EXPECT_EQ(result.standstills[0].missing_ranks.size(), 8U);
  EXPECT_NE(result.standstills[0].text.find("rank 8, which has left and 3 more"), std::string::npos)
      << result.standstills[0].text;
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

TEST(Simulate, AnotherSeedIsAnotherRun) {
  SimScenario scenario = three_ranks();
  scenario.jitter.ready_ns_max = 10;
  const double end_ns = simulate(scenario).end_ns;
  ++scenario.seed;
  EXPECT_NE(simulate(scenario).end_ns, end_ns);
}

TEST(Simulate, RefusesAPlanWhoseOperationsTheLinkDoesNotKnow) {
  SimScenario scenario = three_ranks();
  scenario.plans[0] = plan_of({block_of({{0, 60}}, Op::kReduceScatter), block_of({{0, 60}}, Op::kAllGather)});
  expect_refused([&] { simulate(scenario); }, ErrorCode::kInvalidLink,
                 "reduce_scatter, which the profile's link does not know");
}

}  // namespace
}  // namespace gradcast
