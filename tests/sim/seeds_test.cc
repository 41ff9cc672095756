// Rule 0 in simulation: thousands of scenarios from seeds, each held against what must come of it. A failure names its
// seed; sim_seeds.h says how to replay it.
#include <gtest/gtest.h>

#include <cstdint>
#include <iostream>
#include <map>
#include <string>

#include "gradcast/policy.h"
#include "tests/sim/expectations.h"
#include "tests/sim/random_scenarios.h"
#include "tests/sim/sim_seeds.h"

namespace gradcast {
namespace {

// So that ctest can run them side by side.
constexpr uint64_t kShardCount = 8;

void print(const RandomScenario& random, const SimResult& result) {
  std::cout << describe(random) << "\n" << result.event_count << " events, " << result.end_ns << " ns\n";
  if (result.finding) {
    std::cout << result.finding->text << "\n";
  }
  for (const SimStandstill& still : result.standstills) {
    std::cout << still.text << "\n";
  }
}

void run_seed(uint64_t seed, bool prints) {
  const RandomScenario random = random_scenario(seed);
  SCOPED_TRACE("GRADCAST_SIM_SEED=" + std::to_string(seed) + ": " + describe(random));
  const SimResult result = simulate(random.scenario);
  if (prints) {
    print(random, result);
  }
  expect_what_must_come(random, result);
}

class Seeds : public testing::TestWithParam<uint64_t> {};

TEST_P(Seeds, EndAsTheyMust) {
  if (const auto replayed = replayed_seed()) {
    if (*replayed % kShardCount == GetParam()) {
      run_seed(*replayed, true);
    }
    return;
  }
  for (uint64_t seed = 1; seed <= sim_seed_count(); ++seed) {
    if (seed % kShardCount == GetParam()) {
      run_seed(seed, false);
    }
    if (testing::Test::HasFailure()) {
      return;
    }
  }
}

// A draw that became one-sided would leave the seeds green and blind.
TEST(SeedScenarios, CoverEveryTroubleAndEveryPolicy) {
  std::map<Trouble, int> troubles;
  std::map<std::string, int> plans;
  std::map<SimRankResult::Outcome, int> outcomes;
  for (uint64_t seed = 1; seed <= 500; ++seed) {
    const RandomScenario random = random_scenario(seed);
    ++troubles[random.trouble];
    ++plans[random.scenario.plans.front().policy];
    for (const SimRankResult& rank : simulate(random.scenario).ranks) {
      ++outcomes[rank.outcome];
    }
  }
  EXPECT_EQ(troubles.size(), 7U);
  for (const auto& [trouble, count] : troubles) {
    EXPECT_GE(count, 10) << static_cast<int>(trouble);
  }
  EXPECT_EQ(plans.size(), policies().size() + 1);  // and those of no policy
  EXPECT_EQ(outcomes.size(), 4U);
}

INSTANTIATE_TEST_SUITE_P(Random, Seeds, testing::Range(uint64_t{0}, kShardCount));

}  // namespace
}  // namespace gradcast
