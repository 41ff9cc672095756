// Runs by hand: what they cost, what stands still and what is said about it, and what is refused.
#include "tests/sim/simulator/simulate.h"

#include <gtest/gtest.h>

#include <limits>
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

TEST(Simulate, AStragglerDelaysEveryRank) {
  SimScenario scenario = three_ranks(1);
  scenario.jitter.straggler_probability = 0.3;
  scenario.jitter.straggler_factor_max = 100;
  const double undisturbed_ns = simulate(three_ranks(1)).end_ns;
  int delayed_count = 0;
  for (scenario.seed = 0; scenario.seed < 20; ++scenario.seed) {
    const SimResult result = simulate(scenario);
    ASSERT_FALSE(result.finding);
    const double slowest_ns = result.iteration_end_ns.front();
    delayed_count += slowest_ns > 2 * undisturbed_ns ? 1 : 0;
    for (const SimRankResult& rank : result.ranks) {
      // All are through with waiting when the straggler's gradients have travelled; only its own forward is longer.
      EXPECT_GT(rank.finish_ns, slowest_ns / 3);
    }
  }
  EXPECT_GT(delayed_count, 5);
}

TEST(Simulate, CountsWhatHappens) {
  const SimResult result = simulate(three_ranks());
  EXPECT_EQ(result.operation_count, 2 * 3);
  EXPECT_EQ(result.event_count, 3 * 2 * (1 + 3 + 3));
  EXPECT_LE(result.queue_peak, 3 * 2);
  EXPECT_EQ(result.operation_peak, 1);
  for (const SimRankResult& rank : result.ranks) {
    EXPECT_EQ(rank.outcome, Outcome::kFinished);
    EXPECT_EQ(rank.reduced_bytes, 2 * 60);
    EXPECT_EQ(rank.launches, (std::vector<SimLaunch>{{0, 0}, {0, 1}, {0, 2}, {1, 0}, {1, 1}, {1, 2}}));
  }
}

TEST(Simulate, APlanChangesWhereAllAgree) {
  SimScenario scenario = three_ranks(3);
  scenario.plans.push_back(plan_of({block_of({{0, 60}})}));
  scenario.changes = {{1, 1}, {2, 0}};
  const SimResult result = simulate(scenario);
  EXPECT_FALSE(result.finding);
  EXPECT_EQ(result.ranks[2].launches, (std::vector<SimLaunch>{{0, 0}, {0, 1}, {0, 2}, {1, 0}, {2, 0}, {2, 1}, {2, 2}}));
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

TEST(Simulate, WhoLeavesAfterTheEndHurtsNobody) {
  const SimResult result = run_with(three_ranks(), {Kind::kLeave, 0, 0, 0, 1e9});
  EXPECT_EQ(result.ranks[0].outcome, Outcome::kFinished);
  EXPECT_TRUE(result.standstills.empty());
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

TEST(Simulate, RefusesScenariosWithoutSense) {
  const auto refused = [](const char* field, ErrorCode code, const auto& spoil) {
    SimScenario scenario = three_ranks();
    spoil(scenario);
    expect_refused([&] { simulate(scenario); }, code, field);
  };
  using enum ErrorCode;
  refused("rank_count", kInvalidOption, [](auto& s) { s.rank_count = 0; });
  refused("iteration_count", kInvalidOption, [](auto& s) { s.iteration_count = 0; });
  refused("plans must", kInvalidOption, [](auto& s) { s.plans.clear(); });
  refused("jitter.ready_ns_max", kInvalidOption, [](auto& s) { s.jitter.ready_ns_max = -1; });
  refused("jitter.link_share", kInvalidOption,
          [](auto& s) { s.jitter.link_share = std::numeric_limits<double>::quiet_NaN(); });
  refused("jitter.late_probability", kInvalidOption, [](auto& s) { s.jitter.late_probability = 2; });
  refused("jitter.straggler_factor_max", kInvalidOption, [](auto& s) { s.jitter.straggler_factor_max = 0.5; });
  refused("changes must name", kInvalidOption, [](auto& s) { s.changes = {{1, 1}}; });
  refused("changes must ascend", kInvalidOption, [](auto& s) { s.changes = {{1, 0}, {0, 0}}; });
  refused("faults[0].rank", kInvalidOption, [](auto& s) { s.faults = {{Kind::kLeave, 3, 0, 0, 0}}; });
  refused("faults[0].iteration", kInvalidOption, [](auto& s) { s.faults = {{Kind::kKeepOldPlan, 0, 0, 0, 0}}; });
  refused("faults[0].subject", kInvalidOption, [](auto& s) { s.faults = {{Kind::kLoseReady, 0, 0, 3, 0}}; });
  refused("faults[0].time_ns", kInvalidOption, [](auto& s) { s.faults = {{Kind::kLeave, 0, 0, 0, -1}}; });
  refused("plans[0] has no blocks", kInvalidPlan, [](auto& s) { s.plans[0].blocks.clear(); });
  refused("plans[0].in_flight", kInvalidPlan, [](auto& s) { s.plans[0].in_flight = 0; });
  refused("plans[0].blocks[1] has a buffer", kInvalidPlan, [](auto& s) { s.plans[0].blocks[1].buffer = 1; });
  refused("plans[0].blocks[1] has no bytes", kInvalidPlan, [](auto& s) { s.plans[0].blocks[1].ranges.clear(); });
  refused("plans[0].blocks[2] is never gathered", kInvalidPlan,
          [](auto& s) { s.plans[0].blocks[2].op = Op::kReduceScatter; });
  refused("reduce_scatter, which the profile's link does not know", kInvalidLink, [](auto& s) {
    s.plans[0] = plan_of({block_of({{0, 60}}, Op::kReduceScatter), block_of({{0, 60}}, Op::kAllGather)});
  });
  refused("ready_ns", kInvalidProfile, [](auto& s) { s.profile.tensors[0].ready_ns = 200; });
}

}  // namespace
}  // namespace gradcast
