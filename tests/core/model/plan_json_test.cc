// Plans as JSON: what goes round unchanged, and what is refused with the field by name.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "gradcast/plan.h"
#include "tests/core/hand_profiles.h"
#include "tests/core/model/json_texts.h"
#include "tests/core/profiles.h"
#include "tests/core/random_plans.h"
#include "tests/support/refusals.h"

namespace gradcast {
namespace {

const std::string kPlan = R"({
  "version": 1, "policy": "forecast", "mode": "overlap", "in_flight": 2,
  "blocks": [
    {"op": "all_reduce", "buffer": 0, "ranges": [[0, 400]], "start_ns": 10, "finish_ns": 20, "reason": "first"},
    {"op": "reduce_scatter", "buffer": 1, "ranges": [[0, 2], [4, 6]], "start_ns": 20, "finish_ns": 30, "reason": ""}
  ],
  "predicted_ns": 2000, "bound_ns": 1900, "plain_bound_ns": 1850
})";

TEST(PlanJson, ReadsEveryField) {
  const Plan plan = plan_from_json(kPlan);
  Plan expected = plan_of({block_of({{0, 400}}), block_of({{0, 2}, {4, 6}}, Op::kReduceScatter, 1)}, Mode::kOverlap, 2);
  expected.policy = "forecast";
  expected.blocks[0].start_ns = 10;
  expected.blocks[0].finish_ns = expected.blocks[1].start_ns = 20;
  expected.blocks[1].finish_ns = 30;
  expected.blocks[0].reason = "first";
  expected.predicted_ns = 2000;
  expected.bound_ns = 1900;
  expected.plain_bound_ns = 1850;
  EXPECT_EQ(plan, expected);
  EXPECT_EQ(plan_from_json(with(kPlan, "overlap", "hook")).mode, Mode::kHook);
  EXPECT_EQ(plan_from_json(with(kPlan, ", \"reason\": \"first\"", "")).blocks[0].reason, "");
  EXPECT_EQ(plan_from_json(with(kPlan, "reduce_scatter", "all_gather")).blocks[1].op, Op::kAllGather);
}

TEST(PlanJson, RandomPlansGoRound) {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    Random random(seed);
    RandomProfileOptions profile_options;
    profile_options.buffer_count = 2;
    const Profile profile = random_profile(seed, profile_options);
    RandomPlanOptions options;
    options.mode = random.chance(0.5) ? Mode::kOverlap : Mode::kHook;
    options.in_flight = static_cast<int32_t>(random.integer(1, 5));
    options.scatter_gather = true;
    Plan plan = random_plan(random, profile, options);
    plan.predicted_ns = 123;
    for (Block& block : plan.blocks) {
      block.start_ns = static_cast<double>(random.integer(0, 1'000'000'000));
      block.finish_ns = block.start_ns + 1;
      block.reason = "why \"\\ \n\u00e9";
    }
    const Plan again = plan_from_json(to_json(plan));
    ASSERT_EQ(again, plan) << "seed " << seed;
    ASSERT_EQ(hash_plan(again, profile), hash_plan(plan, profile)) << "seed " << seed;
    ASSERT_EQ(to_json(again), to_json(plan)) << "seed " << seed;
  }
}

TEST(PlanJson, RoundsTimesAndKeepsUnknownFields) {
  const std::string text = with(kPlan, "\"op\"", "\"stream\": 3, \"op\"");
  Plan plan = plan_from_json(with(text, "\"policy\"", "\"origin\": [1, {\"x\": 2}], \"policy\""));
  plan.predicted_ns = 10.5;
  plan.blocks[0].start_ns = 3.4;
  const Plan again = plan_from_json(to_json(plan));
  EXPECT_EQ(again.predicted_ns, 11);
  EXPECT_EQ(again.blocks[0].start_ns, 3);
  EXPECT_EQ(again.extra_json, plan.extra_json);
  EXPECT_TRUE(contains(again.extra_json, "origin"));
  EXPECT_EQ(again.blocks[0].extra_json, "{\"stream\":3}");
}

TEST(PlanJson, RefusesBadFieldsByName) {
  const std::vector<BadField> cases = {
      {"\"version\": 1", "\"version\": 3", "version"},
      {"\"policy\": \"forecast\", ", "", "policy"},
      {"\"mode\": \"overlap\", ", "", "mode"},
      {"\"mode\": \"overlap\"", "\"mode\": \"both\"", "mode"},
      {"\"in_flight\": 2", "\"in_flight\": 0", "in_flight"},
      {"\"blocks\": [", "\"others\": [", "blocks"},
      {"\"op\": \"reduce_scatter\"", "\"op\": \"send\"", "blocks[1].op"},
      {"\"buffer\": 1", "\"buffer\": 4294967296", "blocks[1].buffer"},
      {"[[0, 400]]", "[0, 400]", "blocks[0].ranges[0]"},
      {"[[0, 400]]", "[[0, 400, 500]]", "blocks[0].ranges[0]"},
      {"[[0, 400]]", "[[0, -400]]", "blocks[0].ranges[0]"},
      {"[[0, 400]]", "[[0, \"400\"]]", "blocks[0].ranges[0]"},
      {"[[0, 400]]", "[[0, 9007199254740993]]", "blocks[0].ranges[0]"},
      {"[[0, 400]]", "[[400, 0]]", "blocks[0].ranges[0]"},
      {"[[0, 400]]", "{}", "blocks[0].ranges"},
      {"\"start_ns\": 10", "\"start_ns\": -10", "blocks[0].start_ns"},
      {"\"reason\": \"first\"", "\"reason\": 1", "blocks[0].reason"},
      {"\"predicted_ns\": 2000", "\"predicted_ns\": \"fast\"", "predicted_ns"},
  };
  expect_refused(&plan_from_json, kPlan, cases, ErrorCode::kInvalidPlan);
}

}  // namespace
}  // namespace gradcast
