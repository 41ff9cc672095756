// Every check can fail: runs that break a rule on purpose.
#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "tests/sim/hand_scenarios.h"
#include "tests/sim/simulator/byte_coverage.h"
#include "tests/sim/simulator/simulate.h"

namespace gradcast {
namespace {

using Kind = SimFault::Kind;
using sim::ByteCoverage;

SimFinding finding_of(const SimScenario& scenario) {
  const SimResult result = simulate(scenario);
  EXPECT_TRUE(result.finding);
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

}  // namespace
}  // namespace gradcast
