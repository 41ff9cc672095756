// Goal: forecast owes what docs/internals/planner.md promises: exact plans for nested profiles, elsewhere plans that no other
// policy beats and that stay close to the best there is, and bounds that hold. Method: thousands of seeded profiles,
// exhaustive search on tiny ones, and the published layer times of two models.
#include "planner/forecast.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <ostream>
#include <string>

#include "gradcast/bound.h"
#include "gradcast/play.h"
#include "gradcast/policy.h"
#include "planner/window_chains.h"
#include "planner/zigzag.h"
#include "tests/core/hand_profiles.h"
#include "tests/core/planner/exhaustive.h"
#include "tests/core/planner/grid_cases.h"
#include "tests/core/profiles.h"
#include "tests/core/published.h"
#include "tests/support/refusals.h"
#include "tests/support/seeds.h"

namespace gradcast {
namespace {

using Windows = RandomProfileOptions::Windows;

constexpr int32_t kNoLimit = std::numeric_limits<int32_t>::max();

// Rounding that a comparison of plays may show: one nanosecond per block and 1e-9 of the time.
double rounding_ns(const Plan& plan) {
  return static_cast<double>(plan.blocks.size()) + 1e-9 * plan.predicted_ns;
}

Plan plan_with(const Profile& profile, const std::string& policy, Mode mode = Mode::kOverlap, int32_t in_flight = 1,
               std::map<std::string, double> parameters = {}) {
  return make_plan(profile, profile.link, {policy, mode, in_flight, std::move(parameters)});
}

int32_t fewest_blocks(const Profile& profile, Mode mode, double iteration_ns) {
  const Problem problem = make_problem(profile, profile.link, mode, 1);
  const Chain chain = enlarged_chain(problem, candidate_orders(problem)[0], profile.link.all_reduce);
  return static_cast<int32_t>(zigzag(chain, iteration_ns, kNoLimit).value().size());
}

// Sizes as models have them: elements are small against blocks, so that cutting at whole elements costs nothing.
Profile nested_profile(uint64_t seed) {
  RandomProfileOptions options;
  options.tensor_count_max = 60;
  options.bytes_min = 400'000;
  options.updates = seed % 3 == 0;
  options.scatter_gather = false;
  return random_profile(seed, options);
}

TEST(ForecastNested, ReachesTheProvenOptimumWithOneRangePerBlock) {
  uint64_t exact_count = 0;
  for (uint64_t seed = 0; seed < seed_count(10'000); ++seed) {
    SCOPED_TRACE(seed);
    const Profile profile = nested_profile(seed);
    const Mode mode = seed % 4 == 0 ? Mode::kHook : Mode::kOverlap;
    const Plan plan = plan_with(profile, "forecast", mode);
    ASSERT_TRUE(bound(profile, profile.link, {mode, 1, false}).exact);
    // Bytes are divisible for the proof; each cut moves to a whole element.
    const double element_ns = 4 * profile.link.all_reduce.beta_ns_per_byte_min();
    const double cuts_ns = element_ns * static_cast<double>(plan.blocks.size());
    ASSERT_NEAR(plan.predicted_ns, plan.bound_ns, std::max(1e-6 * plan.bound_ns, cuts_ns));
    ASSERT_GE(plan.predicted_ns, plan.bound_ns - rounding_ns(plan));
    if (cuts_ns > 1e-6 * plan.bound_ns) {
      continue;  // elements are coarse enough here for a search around the exact plan to gain on it, with other blocks
    }
    for (const Block& block : plan.blocks) {
      ASSERT_EQ(block.ranges.size(), 1u);
    }
    // A time that zigzag reaches lies within 1e-9 of the bound.
    ASSERT_LE(static_cast<int32_t>(plan.blocks.size()), fewest_blocks(profile, mode, plan.bound_ns * (1 + 1e-9)));
    ++exact_count;
  }
  EXPECT_GT(exact_count, seed_count(10'000) * 9 / 10);
}

TEST(ForecastNested, TakesTheFewestBlocksWithinATolerance) {
  for (uint64_t seed = 0; seed < seed_count(3'000); ++seed) {
    SCOPED_TRACE(seed);
    const Profile profile = nested_profile(seed);
    const Plan plan = plan_with(profile, "forecast", Mode::kOverlap, 1, {{"block_tolerance", 0.002}});
    ASSERT_LE(plan.predicted_ns, plan.bound_ns * (1.002 + 1e-6));
    ASSERT_EQ(static_cast<int32_t>(plan.blocks.size()), fewest_blocks(profile, Mode::kOverlap, plan.bound_ns * 1.002));
  }
}

RandomProfileOptions any_profile(uint64_t seed) {
  RandomProfileOptions options;
  options.windows = std::array{Windows::kNested, Windows::kDisturbed, Windows::kDisturbed, Windows::kRandom}[seed % 4];
  options.disturbance = seed % 8 < 4 ? 0.02 : 0.2;
  options.tensor_count_max = seed % 5 == 0 ? 40 : 12;
  options.buffer_count = seed % 3 == 0 ? 3 : 1;
  options.link_piece_count = seed % 7 < 2 ? 3 : 1;
  options.updates = seed % 2 == 0;
  options.scatter_gather = seed % 2 == 1;
  return options;
}

TEST(ForecastAnyProfile, IsNotWorseForPartsAndHostsThanThePlanForTheNetwork) {
  const uint64_t seeds = std::max<uint64_t>(200, seed_count(1'000));  // of fewer, a tenth is too few to count
  uint64_t better_count = 0;
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    SCOPED_TRACE(seed);
    const Profile network = random_profile(seed, any_profile(seed));
    Profile profile = network;
    const double passes_ns = profile.backward_ns + profile.forward_ns;
    (seed % 2 == 0 ? profile.part_ns : profile.host_part_ns) = 0.05 * passes_ns;
    profile.host_step_ns = seed % 2 == 0 ? 0 : 0.9 * passes_ns;
    profile.host_block_ns = seed % 3 == 0 ? 0.02 * passes_ns : 0;
    const Mode mode = seed % 5 == 0 ? Mode::kHook : Mode::kOverlap;
    const Plan plan = plan_with(profile, "forecast", mode, 1, {{"effort", 0.1}});
    const Plan blind = plan_with(network, "forecast", mode, 1, {{"effort", 0.1}});
    const double blind_ns = play(profile, profile.link, blind).iteration_ns;
    ASSERT_LE(plan.predicted_ns, blind_ns);
    ASSERT_GE(plan.predicted_ns, plan.bound_ns - rounding_ns(plan));
    ASSERT_GE(plan.bound_ns, blind.bound_ns);
    better_count += plan.predicted_ns < 0.99 * blind_ns ? 1 : 0;
  }
  EXPECT_GT(better_count, seeds / 10);
}

TEST(ForecastAnyProfile, GivesUpNoMoreThanTheToleranceForFewerBlocks) {
  uint64_t fewer_count = 0;
  for (uint64_t seed = 0; seed < seed_count(500); ++seed) {
    SCOPED_TRACE(seed);
    const Profile profile = random_profile(seed, any_profile(seed));
    const Plan best = plan_with(profile, "forecast");
    const Plan fewer = plan_with(profile, "forecast", Mode::kOverlap, 1, {{"block_tolerance", 0.01}});
    ASSERT_NO_THROW(check_plan(fewer, profile));
    ASSERT_LE(fewer.blocks.size(), best.blocks.size());
    ASSERT_LE(fewer.predicted_ns, best.predicted_ns * (1.01 + 1e-6));
    fewer_count += fewer.blocks.size() < best.blocks.size() ? 1 : 0;
  }
  EXPECT_GT(fewer_count, seed_count(500) / 4);
}

TEST(ForecastAnyProfile, IsNeverWorseThanAnotherPolicyAndNeverBelowTheBound) {
  for (uint64_t seed = 0; seed < seed_count(10'000); ++seed) {
    SCOPED_TRACE(seed);
    const Profile profile = random_profile(seed, any_profile(seed));
    const Mode mode = seed % 5 == 4 ? Mode::kHook : Mode::kOverlap;
    const int32_t in_flight = seed % 11 < 8 ? 1 : static_cast<int32_t>(seed % 11) - 6;  // 1, 2 … 4
    const Plan forecast = plan_with(profile, "forecast", mode, in_flight);
    ASSERT_GE(forecast.predicted_ns, forecast.bound_ns - rounding_ns(forecast));
    ASSERT_GE(forecast.bound_ns, forecast.plain_bound_ns - 1e-9 * forecast.bound_ns);
    for (const PolicyInfo& info : policies()) {
      const bool possible = !info.needs_scatter_gather || profile.link.reduce_scatter.available();
      if (!possible || (info.overlap_only && mode == Mode::kHook)) {
        continue;
      }
      const Plan plan = plan_with(profile, info.name, mode, in_flight);
      ASSERT_LE(forecast.predicted_ns, plan.predicted_ns * (1 + 1e-6)) << info.name;
      ASSERT_GE(plan.predicted_ns, plan.bound_ns - rounding_ns(plan)) << info.name;
    }
  }
}

struct GridKind {
  const char* name;
  GridCaseOptions options;
  Mode mode = Mode::kOverlap;
  double worst_max = 0.05;
};

void PrintTo(const GridKind& kind, std::ostream* out) {
  *out << kind.name;
}

class ForecastSmall : public ::testing::TestWithParam<GridKind> {};

TEST_P(ForecastSmall, StaysCloseToExhaustiveSearch) {
  const GridKind& kind = GetParam();
  const uint64_t seeds = seed_count(1'500);
  double mean = 0;
  double worst = 0;
  uint64_t worst_seed = 0;
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    const Profile profile = grid_case(seed, kind.options);
    const double best_ns = exhaustive_best(profile, profile.link, {kind.mode, kGridUnitBytes}).iteration_ns;
    const double above = std::max(0.0, plan_with(profile, "forecast", kind.mode).predicted_ns / best_ns - 1);
    mean += above / static_cast<double>(seeds);
    worst_seed = above > worst ? seed : worst_seed;
    worst = std::max(worst, above);
  }
  RecordProperty("mean_excess_percent", std::to_string(100 * mean));
  RecordProperty("worst_excess_percent", std::to_string(100 * worst));
  EXPECT_LT(mean, 0.01);
  EXPECT_LT(worst, kind.worst_max) << "seed " << worst_seed;
}

// Where joining bytes costs a copy, most urgent first is no longer the best content, and the search knows no better
// one.
INSTANTIATE_TEST_SUITE_P(
    Kinds, ForecastSmall,
    ::testing::Values(
        GridKind{"nested", {.updates = true}}, GridKind{"disturbed", {.windows = Windows::kDisturbed}},
        GridKind{"random", {.windows = Windows::kRandom, .updates = true}},
        GridKind{"nested_piecewise", {.link_piece_count = 3}},
        GridKind{"random_piecewise", {.windows = Windows::kRandom, .link_piece_count = 2}},
        GridKind{"nested_buffers", {.buffer_count = 2}},
        GridKind{"random_buffers_piecewise", {.windows = Windows::kRandom, .buffer_count = 3, .link_piece_count = 2}},
        GridKind{"packing", {.windows = Windows::kRandom, .unit_count_max = 9, .packing = true}, Mode::kOverlap, 0.08},
        GridKind{"hook", {.windows = Windows::kRandom}, Mode::kHook},
        GridKind{"hook_buffers", {.windows = Windows::kRandom, .buffer_count = 2}, Mode::kHook}),
    [](const auto& info) { return std::string(info.param.name); });

// Where dear's operations are there but cost more than an all-reduce, the exact plan stays; where they cost less,
// dear's may win.
TEST(ForecastNested, IsExactBesideOtherOperations) {
  for (uint64_t seed = 0; seed < seed_count(1'000); ++seed) {
    SCOPED_TRACE(seed);
    Profile profile = nested_profile(seed);
    const LinkModel costly = scaled(profile.link, 1.01, 1.01);
    profile.link.reduce_scatter = profile.link.all_gather = costly.all_reduce;
    const Plan plan = plan_with(profile, "forecast");
    const Bound proven = bound(profile, profile.link, {});
    const double element_ns = 4 * profile.link.all_reduce.beta_ns_per_byte_min();
    ASSERT_NEAR(plan.predicted_ns, proven.best_ns,
                std::max(1e-6 * proven.best_ns, element_ns * static_cast<double>(plan.blocks.size())));
  }
}

// Success need not be monotone in the iteration time where the cost bends: a longer slot may merge two cheaper ones.
// This profile, found by search, has such a gap just above the best time that zigzag finds.
TEST(ForecastBentCost, PlansWhereReachableTimesHaveGaps) {
  Profile profile = profile_of(1'000'000, 215'581,
                               {{2280, 999949.377192754, 0},
                                {16447, 998454.7139657647, 0.10862526755005537},
                                {105225, 900007.7048236579, 1.9273913982759348},
                                {11649, 895552.4176979604, 67.38072934641977},
                                {1, 729000.5297058285, 3187.5086905075823},
                                {1, 728504.421499423, 3187.5086905075823},
                                {2, 647151.607812766, 3591.1593459601227},
                                {11528, 616713.8085612757, 10884.684716612337},
                                {759, 581623.8516485768, 103121.24860320757},
                                {1, 529183.1470187193, 114599.14095169111},
                                {21047, 518440.47133015573, 121598.00279607048},
                                {12747, 499825.4269390331, 215545.4959751851},
                                {38457, 436054.37438196153, 215573.940582871},
                                {687010, 380940.3694470655, 215580.5850181066}});
  profile.link.all_reduce.pieces = {{63670, 35126.577419900015, 2.0777506069989773},
                                    {256906, 127602.2253270967, 0.6253295624380117},
                                    {kUnboundedBytes, 215501.8098160196, 0.3580525996522463}};
  const Plan plan = plan_with(profile, "forecast");
  EXPECT_GE(plan.predicted_ns, plan.bound_ns - rounding_ns(plan));
}

TEST(ForecastHook, WholeTensorsAreNeverWorseThanOtherWholeTensorPolicies) {
  for (uint64_t seed = 0; seed < seed_count(2'000); ++seed) {
    SCOPED_TRACE(seed);
    RandomProfileOptions options = any_profile(seed);
    Profile profile = random_profile(seed, options);
    profile.link.pack_ns_per_byte = seed % 6 == 0 ? profile.link.all_reduce.beta_ns_per_byte_min() : 0;
    const Plan plan = plan_with(profile, "forecast", Mode::kHook, 1, {{"whole_tensors", 1}});
    for (const char* policy : {"ddp", "mgwfbp", "fifo"}) {
      ASSERT_LE(plan.predicted_ns, plan_with(profile, policy, Mode::kHook).predicted_ns * (1 + 1e-9)) << policy;
    }
  }
}

TEST(Forecast, PlansManyTensorsAndBuffersAndTerabytes) {
  Profile profile = random_profile(3, {.windows = Windows::kRandom, .tensor_count_min = 400, .tensor_count_max = 400});
  for (size_t i = 0; i < profile.tensors.size(); ++i) {
    profile.tensors[i].buffer = static_cast<int32_t>(i % 300);
    profile.tensors[i].bytes = int64_t{1} << (i % 44);
    profile.tensors[i].element_bytes = 1;
  }
  const Plan plan = plan_with(profile, "forecast");
  EXPECT_GE(plan.predicted_ns, plan.bound_ns - rounding_ns(plan));
  EXPECT_EQ(plan_with(profile, "forecast", Mode::kOverlap, 1, {{"effort", 0}}).policy, "forecast");
}

TEST(ForecastHook, WholeTensorsEqualTheBestOfAllBucketings) {
  for (uint64_t seed = 0; seed < seed_count(3'000); ++seed) {
    SCOPED_TRACE(seed);
    RandomProfileOptions options;
    options.windows = seed % 2 == 0 ? Windows::kNested : Windows::kRandom;
    options.tensor_count_max = 9;
    const Profile profile = random_profile(seed, options);
    const Plan plan = plan_with(profile, "forecast", Mode::kHook, 1, {{"whole_tensors", 1}});
    const double best_ns = best_whole_tensor_buckets_ns(profile, profile.link);
    ASSERT_NEAR(plan.predicted_ns, best_ns, 1e-8 * best_ns);
  }
}

TEST(ForecastHook, WholeTensorsAreRefusedInOverlapMode) {
  const Profile profile = nested_profile(1);
  expect_refused(
      [&] {
        plan_with(profile, "forecast", Mode::kOverlap, 1, {{"whole_tensors", 1}});
      },
      ErrorCode::kInvalidOption, "hook mode");
}

double worst_ratio(const Profile& profile, const Plan& plan, double uncertainty) {
  double ratio = 1;
  for (const double alpha_factor : {1 - uncertainty, 1.0, 1 + uncertainty}) {
    for (const double beta_factor : {1 - uncertainty, 1.0, 1 + uncertainty}) {
      const LinkModel link = scaled(profile.link, alpha_factor, beta_factor);
      const double best_ns = bound(profile, link, {}).best_ns;
      ratio = std::max(ratio, play(profile, link, plan).iteration_ns / best_ns);
    }
  }
  return ratio;
}

TEST(ForecastUncertainty, LowersTheWorstRatioOverTheRange) {
  int lower = 0;
  for (uint64_t seed = 0; seed < seed_count(300); ++seed) {
    SCOPED_TRACE(seed);
    const Profile profile = nested_profile(seed);
    const double sure = worst_ratio(profile, plan_with(profile, "forecast"), 0.1);
    const double robust =
        worst_ratio(profile, plan_with(profile, "forecast", Mode::kOverlap, 1, {{"uncertainty", 0.1}}), 0.1);
    ASSERT_LE(robust, sure * (1 + 1e-6));
    lower += robust < sure * (1 - 1e-4);
  }
  EXPECT_GT(lower, static_cast<int>(seed_count(300) / 10));
}

// The table of docs/internals/planner.md, "Evidence": layer times of batch 64, communication and alpha as shares of compute.
struct Evidence {
  const char* model;
  double communication;
  double alpha;
  double ratio_to_plain;
  size_t block_count_within_tolerance;
};

Profile published_profile(const std::string& model, double communication, double alpha) {
  Profile profile = profile_from_layer_table(published_layers(model), {model, 0.5, 8});
  double total_bytes = 0;
  for (const Tensor& tensor : profile.tensors) {
    total_bytes += static_cast<double>(tensor.bytes);
  }
  const double compute_ns = profile.forward_ns + profile.backward_ns;
  profile.link.all_reduce.pieces = {{kUnboundedBytes, alpha * compute_ns, communication * compute_ns / total_bytes}};
  return profile;
}

TEST(ForecastEvidence, RatiosOfPublishedModels) {
  for (const Evidence& row : {Evidence{"resnet50", 1.0, 0.01, 1.0520, 6}, Evidence{"resnet50", 1.5, 0.004, 1.0106, 5},
                              Evidence{"resnet50", 0.7, 0.02, 1.0000, 5}, Evidence{"vgg16", 1.0, 0.01, 1.0364, 4},
                              Evidence{"vgg16", 1.5, 0.004, 1.0106, 4}, Evidence{"vgg16", 0.7, 0.02, 1.0000, 3}}) {
    SCOPED_TRACE(row.model);
    const Profile profile = published_profile(row.model, row.communication, row.alpha);
    const Plan plan = plan_with(profile, "forecast");
    EXPECT_NEAR(plan.predicted_ns / plan.plain_bound_ns, row.ratio_to_plain, 5e-5);
    const Plan fewest = plan_with(profile, "forecast", Mode::kOverlap, 1, {{"block_tolerance", 0.002}});
    EXPECT_EQ(fewest.blocks.size(), row.block_count_within_tolerance);
  }
}

// More blocks in flight hide alpha where the network overlaps it: nearly the whole gap to the plain bound closes.
TEST(ForecastEvidence, SeveralBlocksInFlightHideAlpha) {
  const Profile profile = published_profile("resnet50", 1.0, 0.01);
  const Plan two = plan_with(profile, "forecast", Mode::kOverlap, 2);
  EXPECT_LT(two.predicted_ns / two.plain_bound_ns, 1.0075);
  const Plan three = plan_with(profile, "forecast", Mode::kOverlap, 3);
  EXPECT_LT(three.predicted_ns / three.plain_bound_ns, 1.0015);
}

}  // namespace
}  // namespace gradcast
