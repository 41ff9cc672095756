// Every check can fail: runs that break a rule on purpose, and the judge of a rank told of a follower that breaks its
// own.
#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "gradcast/error.h"
#include "tests/sim/hand_scenarios.h"
#include "tests/sim/simulator/byte_coverage.h"
#include "tests/sim/simulator/event_queue.h"
#include "tests/sim/simulator/rank_checker.h"
#include "tests/sim/simulator/simulate.h"

namespace gradcast {
namespace {

using Kind = SimFault::Kind;
using sim::ByteCoverage;
using sim::RankChecker;

SimFinding finding_of(const SimScenario& scenario) {
  const SimResult result = simulate(scenario);
  EXPECT_TRUE(result.finding);
  EXPECT_TRUE(result.standstills.empty());
  return result.finding.value_or(SimFinding());
}

TEST(Controls, ARankThatKeepsTheOldPlanIsFound) {
  SimScenario scenario = scenario_of(three_layers(), {layer_by_layer(), layer_by_layer()}, 4, 3);
  scenario.plans[1].blocks = {block_of({{30, 60}}), block_of({{0, 30}})};
  scenario.changes = {{1, 1}};
  EXPECT_FALSE(simulate(scenario).finding);
  scenario.faults = {{Kind::kKeepOldPlan, 2, 1, 0, 0}};
  const SimFinding finding = finding_of(scenario);
  EXPECT_EQ(finding.rule, SimRule::kSameOperation);
  EXPECT_EQ(finding.iteration, 1);
  EXPECT_EQ(finding.block, 1);
  EXPECT_TRUE(finding.rank == 2 || finding.other_rank == 2) << finding.text;
  EXPECT_NE(finding.text.find("operation 4 is block 2 of"), std::string::npos) << finding.text;
}

TEST(Controls, BytesThatTravelTwiceOrNeverAreFound) {
  const std::vector<std::vector<Range>> wrong = {{{30, 60}, {10, 30}, {0, 11}}, {{30, 60}, {11, 30}, {0, 10}}};
  const char* texts[] = {"byte 10 of buffer 0 is reduced more than once", "byte 10 of buffer 0 is never reduced"};
  for (size_t i = 0; i < wrong.size(); ++i) {
    Plan plan;
    for (const Range& range : wrong[i]) {
      plan.blocks.push_back(block_of({range}));
    }
    const SimFinding finding = finding_of(scenario_of(three_layers(), {plan}, 2, 1));
    EXPECT_EQ(finding.rule, SimRule::kEveryByte);
    EXPECT_EQ(finding.iteration, 0);
    EXPECT_NE(finding.text.find(texts[i]), std::string::npos) << finding.text;
  }
}

TEST(Controls, AnEndThatIsToldTwiceIsFound) {
  for (const int32_t block : {0, 2}) {
    SimScenario scenario = scenario_of(three_layers(), {layer_by_layer()}, 3, 2);
    scenario.faults = {{Kind::kRepeatCompletion, 1, 0, block, 0}};
    const SimFinding finding = finding_of(scenario);
    EXPECT_EQ(finding.rule, SimRule::kOneEnd);
    EXPECT_EQ(finding.rank, 1);
  }
}

// --- The books ---

TEST(LedgerControls, GathersAndScattersAreBookedApart) {
  ByteCoverage coverage(three_layers());
  const auto enter = [&](Range range, Op op) { coverage.add(block_of({range}, op)); };
  enter({0, 40}, Op::kReduceScatter);
  enter({40, 60}, Op::kAllReduce);
  enter({0, 40}, Op::kAllGather);
  EXPECT_EQ(coverage.finish(), std::nullopt);
  enter({0, 40}, Op::kReduceScatter);
  enter({40, 60}, Op::kAllReduce);
  enter({0, 39}, Op::kAllGather);
  EXPECT_EQ(coverage.finish(), "byte 39 of buffer 0 is never finished");
  enter({0, 61}, Op::kAllReduce);
  EXPECT_EQ(coverage.finish(), "byte 60 of buffer 0 does not exist");
  EXPECT_EQ(coverage.finish(), "byte 0 of buffer 0 is never reduced");
}

// --- The checker of a rank, and followers that the real one is not ---

// The rules that a follower breaks which starts these blocks, the last of them, with these gradients ready.
std::optional<SimRule> broken_by(const Plan& plan, const std::vector<int32_t>& ready,
                                 const std::vector<int32_t>& launches) {
  const FollowedPlan followed(three_layers(), plan);
  RankChecker checker;
  checker.begin(followed);
  for (const int32_t tensor : ready) {
    checker.on_ready(tensor);
  }
  std::optional<SimRule> broken;
  for (const int32_t block : launches) {
    EXPECT_EQ(broken, std::nullopt);
    broken = checker.on_launch(block);
  }
  return broken;
}

TEST(CheckerControls, ABlockThatMayNotStart) {
  const std::vector<int32_t> all = {2, 1, 0};
  const Plan halves =
      plan_of({block_of({{0, 60}}, Op::kReduceScatter), block_of({{0, 60}}, Op::kAllGather)}, Mode::kOverlap, 2);
  EXPECT_EQ(broken_by(layer_by_layer(3), all, {1}), SimRule::kPlanOrder);
  EXPECT_EQ(broken_by(layer_by_layer(3), all, {0, 0}), SimRule::kPlanOrder);
  EXPECT_EQ(broken_by(layer_by_layer(3), all, {-1}), SimRule::kPlanOrder);
  EXPECT_EQ(broken_by(plan_of({block_of({{0, 60}})}), all, {0, 1}), SimRule::kPlanOrder) << "after the last";
  EXPECT_EQ(broken_by(plan_of({block_of({{5, 60}}), block_of({{0, 5}})}), {2, 1}, {0}), SimRule::kReady);
  EXPECT_EQ(broken_by(halves, all, {0, 1}), SimRule::kReady) << "a gather before its scatter has ended";
  EXPECT_EQ(broken_by(layer_by_layer(2), all, {0, 1, 2}), SimRule::kInFlight);
}

TEST(CheckerControls, AnEndTwiceOrBeforeTheStart) {
  const FollowedPlan plan(three_layers(), layer_by_layer());
  RankChecker checker;
  checker.begin(plan);
  for (const int32_t tensor : {2, 1, 0}) {
    checker.on_ready(tensor);
  }
  EXPECT_EQ(checker.on_finish(0, {}), SimRule::kOneEnd);
  EXPECT_EQ(checker.on_launch(0), std::nullopt);
  EXPECT_EQ(checker.on_finish(0, {2}), std::nullopt);
  EXPECT_EQ(checker.on_finish(0, {}), SimRule::kOneEnd);
  EXPECT_EQ(checker.on_finish(-1, {}), SimRule::kOneEnd);
}

TEST(CheckerControls, ATensorTwiceTooEarlyOrNever) {
  const FollowedPlan plan(three_layers(), plan_of({block_of({{5, 60}}), block_of({{0, 5}})}));
  RankChecker checker;
  const auto after_first = [&](const std::vector<int32_t>& arrived) {
    checker.begin(plan);
    for (const int32_t tensor : {2, 1, 0}) {
      checker.on_ready(tensor);
    }
    EXPECT_EQ(checker.on_launch(0), std::nullopt);
    return checker.on_finish(0, arrived);
  };
  EXPECT_EQ(after_first({1, 2, 0}), SimRule::kArrival);
  EXPECT_EQ(after_first({1, 1}), SimRule::kArrival);
  EXPECT_EQ(after_first({1}), std::nullopt);
  EXPECT_EQ(checker.on_launch(1), std::nullopt);
  EXPECT_EQ(checker.on_finish(1, {0}), SimRule::kArrival);
}

// --- Time ---

TEST(EventQueueControls, EventsComeInTheOrderOfTimeAndThenOfPushing) {
  sim::EventQueue queue;
  for (const int32_t rank : {0, 1, 2, 3}) {
    queue.push({rank == 2 ? 1.0 : 5.0, 0, 0, rank, sim::Event::Kind::kBegin});
  }
  std::vector<int32_t> ranks;
  while (!queue.empty()) {
    ranks.push_back(queue.pop().rank);
  }
  EXPECT_EQ(ranks, std::vector<int32_t>({2, 0, 1, 3}));
  EXPECT_EQ(queue.size_peak(), 4);
  EXPECT_THROW(queue.push({4.0, 0, 0, 0, sim::Event::Kind::kBegin}), Error);
}

}  // namespace
}  // namespace gradcast
