// Rule 0 in simulation: thousands of scenarios from seeds, each held against what must come of it, which is said
// without a look at the simulator: from its plans and its trouble alone. 10,000 seeds usually, a million in
// `make test-long`.
//
// A failure names its seed: GRADCAST_SIM_SEED=123 build/tests/sim_test --gtest_filter='*Seeds*' runs seed 123 alone and
// prints what happens in it.
#include "tests/support/seeds.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "gradcast/play.h"
#include "gradcast/policy.h"
#include "tests/sim/random_scenarios.h"

namespace gradcast {
namespace {

using Outcome = SimRankResult::Outcome;

std::vector<SimLaunch> all_launches(const SimScenario& scenario) {
  std::vector<SimLaunch> launches;
  for (int32_t iteration = 0; iteration < scenario.iteration_count; ++iteration) {
    for (int32_t block = 0; block < std::ssize(plan_in(scenario, iteration).blocks); ++block) {
      launches.push_back({iteration, block});
    }
  }
  return launches;
}

int64_t total_bytes(const Profile& profile) {
  int64_t bytes = 0;
  for (const Tensor& tensor : profile.tensors) {
    bytes += tensor.bytes;
  }
  return bytes;
}

// In every run each rank has launched a beginning of the one order, and no byte twice.
void expect_one_order(const SimScenario& scenario, const SimResult& result) {
  ASSERT_FALSE(result.finding) << result.finding->text;
  const std::vector<SimLaunch> order = all_launches(scenario);
  for (const SimRankResult& rank : result.ranks) {
    ASSERT_LE(rank.launches.size(), order.size());
    ASSERT_EQ(rank.launch_count, std::ssize(rank.launches));
    ASSERT_TRUE(std::equal(rank.launches.begin(), rank.launches.end(), order.begin()));
    ASSERT_LE(rank.reduced_bytes, scenario.iteration_count * total_bytes(scenario.profile));
  }
}

void expect_finished(const SimScenario& scenario, const SimRankResult& rank, const SimResult& result) {
  ASSERT_EQ(rank.outcome, Outcome::kFinished);
  ASSERT_EQ(rank.launches.size(), all_launches(scenario).size());
  ASSERT_EQ(rank.order_hash, result.ranks.front().order_hash);
  ASSERT_EQ(rank.reduced_bytes, scenario.iteration_count * total_bytes(scenario.profile));
}

// Jitter only delays, and nothing in a run gets earlier by a delay elsewhere. So `play` bounds every run from below,
// and a run without jitter is what it says.
void expect_time(const SimScenario& scenario, const SimResult& result) {
  double played_ns = 0;
  for (int32_t iteration = 0; iteration < scenario.iteration_count; ++iteration) {
    const Plan& plan = plan_in(scenario, iteration);
    played_ns += play(scenario.profile, scenario.profile.link, plan).iteration_ns;
    const double rounding_ns = static_cast<double>(plan.blocks.size()) + 1e-9 * played_ns;
    ASSERT_GE(result.iteration_end_ns[iteration], played_ns - rounding_ns);
    const SimJitter& jitter = scenario.jitter;
    if (jitter.compute_share + jitter.straggler_probability + jitter.ready_ns_max + jitter.link_share +
            jitter.completion_ns_max + jitter.late_probability ==
        0) {
      ASSERT_LE(result.iteration_end_ns[iteration], played_ns + rounding_ns);
    }
  }
}

void expect_all_finished(const SimScenario& scenario, const SimResult& result) {
  for (const SimRankResult& rank : result.ranks) {
    expect_finished(scenario, rank, result);
  }
  const int64_t operation_count = std::ssize(all_launches(scenario));
  const int64_t others = scenario.iteration_count * (1 + std::ssize(scenario.profile.tensors));
  ASSERT_EQ(result.operation_count, operation_count);
  ASSERT_GE(result.event_count, scenario.rank_count * (operation_count + others));
  ASSERT_LE(result.event_count, scenario.rank_count * (operation_count + others) + std::ssize(scenario.faults));
  ASSERT_EQ(std::ssize(result.iteration_end_ns), scenario.iteration_count);
  expect_time(scenario, result);
}

// How many operations come before this block in the one order.
int64_t position_of(const SimScenario& scenario, SimLaunch at) {
  int64_t position = at.block;
  for (int32_t iteration = 0; iteration < at.iteration; ++iteration) {
    position += std::ssize(plan_in(scenario, iteration).blocks);
  }
  return position;
}

// The rank has come to this block and not started it. All others have, and wait for that rank.
void expect_others_wait(const SimScenario& scenario, const SimResult& result, int32_t rank, SimLaunch at) {
  for (int32_t each = 0; each < scenario.rank_count; ++each) {
    ASSERT_EQ(result.ranks[each].outcome, Outcome::kStoodStill) << "rank " << each;
    if (each == rank) {
      ASSERT_EQ(result.ranks[each].launch_count, position_of(scenario, at));
    } else {
      ASSERT_GT(result.ranks[each].launch_count, position_of(scenario, at)) << "rank " << each;
    }
  }
}

bool touches(const Profile& profile, const Block& block, int32_t tensor) {
  int64_t lo_bytes = 0;
  for (int32_t i = 0; i < tensor; ++i) {
    lo_bytes += profile.tensors[i].buffer == block.buffer ? profile.tensors[i].bytes : 0;
  }
  const int64_t hi_bytes = lo_bytes + profile.tensors[tensor].bytes;
  return profile.tensors[tensor].buffer == block.buffer && std::ranges::any_of(block.ranges, [&](const Range& range) {
           return range.lo_bytes < hi_bytes && lo_bytes < range.hi_bytes;
         });
}

void expect_lost_ready(const SimScenario& scenario, const SimResult& result) {
  const SimFault& fault = scenario.faults.front();
  const std::vector<Block>& blocks = plan_in(scenario, fault.iteration).blocks;
  const auto first =
      std::ranges::find_if(blocks, [&](const Block& block) { return touches(scenario.profile, block, fault.subject); });
  const auto block = static_cast<int32_t>(first - blocks.begin());
  expect_others_wait(scenario, result, fault.rank, {fault.iteration, block});
}

// How far a rank comes in its plan that is not told of the end of one block: it has one fewer in flight for the rest of
// the iteration, which ends it where that was the only one, and the block's gather cannot start.
int32_t first_not_launched(const Plan& plan, int32_t lost) {
  if (plan.in_flight == 1) {
    return lost + 1;
  }
  for (int32_t block = lost + 1; block < std::ssize(plan.blocks) && plan.blocks[lost].op == Op::kReduceScatter;
       ++block) {
    const Block& gather = plan.blocks[block];
    if (gather.op == Op::kAllGather && gather.buffer == plan.blocks[lost].buffer &&
        gather.ranges == plan.blocks[lost].ranges) {
      return block;
    }
  }
  return static_cast<int32_t>(plan.blocks.size());
}

void expect_lost_completion(const SimScenario& scenario, const SimResult& result) {
  const SimFault& fault = scenario.faults.front();
  const Plan& plan = plan_in(scenario, fault.iteration);
  SimLaunch at{fault.iteration, first_not_launched(plan, fault.subject)};
  if (at.block == std::ssize(plan.blocks)) {
    at = {fault.iteration + 1, 0};
  }
  if (at.iteration < scenario.iteration_count) {
    return expect_others_wait(scenario, result, fault.rank, at);
  }
  for (int32_t rank = 0; rank < scenario.rank_count; ++rank) {
    if (rank == fault.rank) {
      ASSERT_EQ(result.ranks[rank].outcome, Outcome::kStoodStill);
    } else {
      ASSERT_NO_FATAL_FAILURE(expect_finished(scenario, result.ranks[rank], result));
    }
  }
}

void expect_leave(const SimScenario& scenario, const SimResult& result) {
  const SimRankResult& gone = result.ranks[scenario.faults.front().rank];
  if (gone.outcome == Outcome::kFinished) {
    expect_all_finished(scenario, result);
    return;
  }
  ASSERT_EQ(gone.outcome, Outcome::kLeft);
  // Unless it left between the end of the last operation and the moment in which it would have been told.
  const bool is_missed = std::ssize(gone.launches) < std::ssize(all_launches(scenario));
  for (const SimRankResult& rank : result.ranks) {
    ASSERT_NE(rank.outcome, Outcome::kStopped);
    ASSERT_TRUE(&rank == &gone || !is_missed || rank.outcome == Outcome::kStoodStill);
  }
}

// Fails the running test where the result is another one.
void expect_what_must_come(const RandomScenario& random, const SimResult& result) {
  const SimScenario& scenario = random.scenario;
  ASSERT_NO_FATAL_FAILURE(expect_one_order(scenario, result));
  switch (random.trouble) {
    case Trouble::kLostReady:
      return expect_lost_ready(scenario, result);
    case Trouble::kLostCompletion:
      return expect_lost_completion(scenario, result);
    case Trouble::kLeave:
      return expect_leave(scenario, result);
    case Trouble::kMany:
      return;  // one order is all that can be said
    case Trouble::kNone:
      return expect_all_finished(scenario, result);
  }
}

// In a run that is to be long, simulated seeds are cheap enough for ten times the share of other tests.
uint64_t sim_seed_count() {
  constexpr uint64_t kUsual = 10'000;
  const uint64_t count = seed_count(kUsual);
  return count > kUsual ? 10 * count : count;
}

// So that ctest can run them side by side.
constexpr uint64_t kShardCount = 8;

void print(const RandomScenario& random, const SimResult& result) {
  std::cout << describe(random) << "\n" << result.event_count << " events, " << result.end_ns << " ns\n";
  if (result.finding) {
    std::cout << result.finding->text << "\n";
  }
  for (const SimRankResult& rank : result.ranks) {
    std::cout << rank.launch_count << " launched, outcome " << static_cast<int>(rank.outcome) << "\n";
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
  if (const char* replayed = std::getenv("GRADCAST_SIM_SEED")) {
    const uint64_t seed = std::strtoull(replayed, nullptr, 10);
    if (seed % kShardCount == GetParam()) {
      run_seed(seed, true);
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
  EXPECT_EQ(troubles.size(), 5U);
  for (const auto& [trouble, count] : troubles) {
    EXPECT_GE(count, 10) << static_cast<int>(trouble);
  }
  EXPECT_EQ(plans.size(), policies().size() + 1);  // and those of no policy
  EXPECT_EQ(outcomes.size(), 3U);
}

INSTANTIATE_TEST_SUITE_P(Random, Seeds, testing::Range(uint64_t{0}, kShardCount));

}  // namespace
}  // namespace gradcast
