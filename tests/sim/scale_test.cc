// Thousands of ranks: a real model on 1,024, and 16,384 that lose one.
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <string>

#include "gradcast/networks.h"
#include "gradcast/policy.h"
#include "tests/sim/hand_scenarios.h"
#include "tests/sim/simulator/simulate.h"

namespace gradcast {
namespace {

using Outcome = SimRankResult::Outcome;

Profile resnet50(int32_t rank_count) {
  std::ifstream file(std::string(GRADCAST_DATA_DIR) + "/resnet50.json");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  Profile profile = profile_from_json(text);
  profile.link = tree_link({50e3, 1.25e9}, rank_count);
  return profile;
}

TEST(Scale, ThousandRanksFollowARealModelInOneOrder) {
  constexpr int32_t kRanks = 1024;
  SimScenario scenario = scenario_of(resnet50(kRanks), {}, kRanks, 1);
  scenario.keep_launches = false;
  scenario.plans.push_back(make_plan(scenario.profile, scenario.profile.link, {.in_flight = 2}));
  scenario.jitter = {.compute_share = 0.1,
                     .straggler_probability = 0.01,
                     .straggler_factor_max = 3,
                     .ready_ns_max = 5e6,
                     .link_share = 0.2,
                     .completion_ns_max = 1e6,
                     .late_probability = 0.001,
                     .late_ns_max = 1e8};
  const SimResult result = simulate(scenario);
  EXPECT_FALSE(result.finding);
  for (const SimRankResult& rank : result.ranks) {
    ASSERT_EQ(rank.outcome, Outcome::kFinished);
    ASSERT_EQ(rank.order_hash, result.ranks.front().order_hash);
    ASSERT_EQ(rank.reduced_bytes, 102'228'128);
  }
  // What waits at once is one gradient and the blocks in flight of each rank, however long the model.
  EXPECT_LE(result.queue_peak, kRanks * (1 + 2));
}

TEST(Scale, SixteenThousandRanksStandStillWhereOneHasLeft) {
  constexpr int32_t kRanks = 16384;
  SimScenario scenario = scenario_of(three_layers(), {layer_by_layer()}, kRanks, 2);
  scenario.keep_launches = false;
  scenario.jitter.ready_ns_max = 20;
  scenario.faults = {{SimFault::Kind::kLeave, 9999, 0, 0, 250}};
  const SimResult result = simulate(scenario);
  for (int32_t rank = 0; rank < kRanks; ++rank) {
    ASSERT_EQ(result.ranks[rank].outcome, rank == 9999 ? Outcome::kLeft : Outcome::kStoodStill) << rank;
  }
}

}  // namespace
}  // namespace gradcast
