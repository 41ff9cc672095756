// bound(): the examples that fix its meaning, the simple formula against its own definition, and validity, the property
// that everything else rests on: no plan, searched exhaustively or made at random, is faster.
#include "gradcast/bound.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <ostream>
#include <string>
#include <vector>

#include "gradcast/play.h"
#include "tests/core/hand_profiles.h"
#include "tests/core/planner/exhaustive.h"
#include "tests/core/planner/grid_cases.h"
#include "tests/core/profiles.h"
#include "tests/core/random_plans.h"

namespace gradcast {
namespace {

using Windows = RandomProfileOptions::Windows;

constexpr Windows kAllWindows[] = {Windows::kNested, Windows::kDisturbed, Windows::kRandom};

// What "not below the bound" allows.
double tolerance_ns(double time_ns) {
  return 1e-9 * time_ns;
}

// The examples of docs/internals/planner.md: joined or apart, one alpha is not enough; the last burst; one that is not.
TEST(Bound, KnownExamples) {
  const auto expect_bounds = [](const Profile& profile, double plain_ns, double best_ns) {
    const Bound result = bound(profile, link_of(1, 1), {});
    EXPECT_DOUBLE_EQ(result.plain_ns, plain_ns);
    EXPECT_NEAR(result.best_ns, best_ns, 1e-8);
    EXPECT_TRUE(result.exact);
  };
  expect_bounds(profile_of(0.5, 1, {{1, 0.5, 0}, {1, 0, 0}}), 4, 4.5);
  expect_bounds(profile_of(5, 10, {{1, 5, 0}, {10, 0, 10}}), 17, 17);
  expect_bounds(profile_of(10, 1, {{1, 10, 0}, {1, 5, 0}, {10, 0, 0}}), 14, 15);
}

TEST(Bound, AHostIsALimitOfItsOwn) {
  Profile profile = profile_of(0.5, 1, {{1, 0.5, 0}, {1, 0, 0}});
  profile.host_step_ns = 10;
  EXPECT_DOUBLE_EQ(bound(profile, link_of(1, 1), {}).best_ns, 10);
  EXPECT_TRUE(bound(profile, link_of(1, 1), {}).exact) << "every plan has it";
  profile.host_block_ns = 2;
  EXPECT_DOUBLE_EQ(bound(profile, link_of(1, 1), {}).best_ns, 12) << "a plan has one block at least";
  EXPECT_FALSE(bound(profile, link_of(1, 1), {}).exact);
  profile.host_step_ns = profile.host_block_ns = 0;
  profile.part_ns = 1;
  EXPECT_NEAR(bound(profile, link_of(1, 1), {}).best_ns, 4.5, 1e-8);
  EXPECT_FALSE(bound(profile, link_of(1, 1), {}).exact);
}

TEST(Bound, APiecewiseCostIsNotPutIntoTheFormula) {
  // The formula with the cost of 20 bytes says 25; two blocks of 10 take 22.
  LinkModel link;
  link.all_reduce.pieces = {{10, 1, 1}, {kUnboundedBytes, 5, 1}};
  const Bound result = bound(profile_of(0, 0, {{20, 0, 0}}), link, {});
  EXPECT_DOUBLE_EQ(result.plain_ns, 21);  // the smallest alpha and the smallest beta
  EXPECT_GE(result.best_ns, 21);
  EXPECT_LE(result.best_ns, 22 + 1e-8);
  EXPECT_FALSE(result.exact);
}

TEST(Bound, ScatterAndGatherMayBeCheaper) {
  const Profile profile = profile_of(0, 0, {{4, 0, 0}});
  LinkModel link = link_of(2, 3);
  link.reduce_scatter = linear_cost({3, 1});
  EXPECT_DOUBLE_EQ(bound(profile, link, {Mode::kOverlap, 1, true}).plain_ns, 14) << "no all-gather, no cheaper way";
  link.all_gather = linear_cost({1, 1});
  EXPECT_DOUBLE_EQ(bound(profile, link, {Mode::kOverlap, 1, false}).plain_ns, 14);
  // The smaller alpha, 2 against 3 + 1, and the smaller beta, 1 + 1 against 3.
  EXPECT_DOUBLE_EQ(bound(profile, link, {Mode::kOverlap, 1, true}).plain_ns, 10);
}

TEST(Bound, StartUpOfAGatherHidesBehindOtherScatters) {
  // Three in flight: scatters until 6 and 7, gathers launched at 6 and 7, their bytes from 11 to 12 and 13. A bound
  // that counts both start-ups in full, 10 + 4, would be above this plan.
  const Profile profile = profile_of(0, 0, {{2, 0, 0}});
  LinkModel link = link_of(100, 100);
  link.reduce_scatter = linear_cost({5, 1});
  link.all_gather = linear_cost({5, 1});
  const Plan plan = plan_of({block_of({{0, 1}}, Op::kReduceScatter), block_of({{1, 2}}, Op::kReduceScatter),
                             block_of({{0, 1}}, Op::kAllGather), block_of({{1, 2}}, Op::kAllGather)},
                            Mode::kOverlap, 3);
  ASSERT_DOUBLE_EQ(play(profile, link, plan).iteration_ns, 13);
  EXPECT_LE(bound(profile, link, {Mode::kOverlap, 3, true}).plain_ns, 13);
  EXPECT_LE(bound(profile, link, {Mode::kOverlap, 3, true}).best_ns, 13);
}

TEST(Bound, ExactOnlyWhereItIsProven) {
  Profile profile = profile_of(10, 8, {{4, 10, 0}, {6, 4, 3}, {2, 0, 5}});
  LinkModel link = link_of(2, 1);
  EXPECT_TRUE(bound(profile, link, {}).exact);
  EXPECT_TRUE(bound(profile, link, {Mode::kHook}).exact);
  EXPECT_FALSE(bound(profile, link, {Mode::kOverlap, 2}).exact);
  EXPECT_FALSE(bound(profile, link, {Mode::kOverlap, 1, true}).exact && link.all_gather.available());
  LinkModel bent = link;
  bent.all_reduce.pieces = {{5, 2, 1}, {kUnboundedBytes, 3, 1}};
  EXPECT_FALSE(bound(profile, bent, {}).exact);
  Profile buffers = profile;
  buffers.tensors[1].buffer = 1;
  EXPECT_FALSE(bound(buffers, link, {}).exact);
  Profile crossed = profile;
  crossed.tensors[2].ready_ns = 9;  // ready later than the more urgent tensor 1
  EXPECT_FALSE(bound(crossed, link, {}).exact);
}

// The definition, word for word: every pair of a ready time and a need, the set between them, the simple formula.
double plain_by_definition_ns(const Profile& profile, double alpha_ns, double beta_ns_per_byte, Mode mode) {
  std::vector<double> need_ns;
  double updates_ns = 0;
  for (const Tensor& tensor : profile.tensors) {
    need_ns.push_back(mode == Mode::kOverlap ? tensor.need_ns + updates_ns : 0);
    updates_ns += tensor.update_ns;
  }
  const double forward_ns = profile.forward_ns + updates_ns;
  double plain_ns = profile.backward_ns + forward_ns;
  for (const Tensor& first : profile.tensors) {
    for (const double last_need_ns : need_ns) {
      double set_bytes = 0;
      for (size_t i = 0; i < profile.tensors.size(); ++i) {
        const bool inside = profile.tensors[i].ready_ns >= first.ready_ns && need_ns[i] <= last_need_ns;
        set_bytes += inside ? static_cast<double>(profile.tensors[i].bytes) : 0;
      }
      if (set_bytes > 0) {
        plain_ns =
            std::max(plain_ns, first.ready_ns + alpha_ns + beta_ns_per_byte * set_bytes + forward_ns - last_need_ns);
      }
    }
  }
  return plain_ns;
}

TEST(Bound, PlainIsItsDefinition) {
  for (const Windows windows : kAllWindows) {
    for (uint64_t seed = 1; seed <= 600; ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed));
      RandomProfileOptions options;
      options.windows = windows;
      options.updates = seed % 2 == 0;
      options.buffer_count = seed % 3 == 0 ? 2 : 1;
      options.link_piece_count = seed % 5 == 0 ? 3 : 1;
      const Profile profile = random_profile(seed, options);
      double alpha_ns = kTimeMaxNs;
      double beta_ns_per_byte = kTimeMaxNs;
      for (const LinkPiece& piece : profile.link.all_reduce.pieces) {
        alpha_ns = std::min(alpha_ns, piece.alpha_ns);
        beta_ns_per_byte = std::min(beta_ns_per_byte, piece.beta_ns_per_byte);
      }
      for (const Mode mode : {Mode::kOverlap, Mode::kHook}) {
        const double expected_ns = plain_by_definition_ns(profile, alpha_ns, beta_ns_per_byte, mode);
        for (const int32_t in_flight : {1, 2}) {
          const Bound result = bound(profile, profile.link, {mode, in_flight});
          ASSERT_NEAR(result.plain_ns, expected_ns, tolerance_ns(expected_ns));
          ASSERT_GE(result.best_ns, result.plain_ns);
        }
      }
    }
  }
}

GridCaseOptions grid_options(Windows windows, uint64_t seed, int32_t unit_count_max, int32_t tensor_count_max) {
  GridCaseOptions options;
  options.windows = windows;
  options.unit_count_max = unit_count_max;
  options.tensor_count_max = tensor_count_max;
  options.buffer_count = seed % 4 == 0 ? 2 : 1;
  options.link_piece_count = seed % 3 == 0 ? 3 : 1;
  options.updates = seed % 5 < 2;
  return options;
}

void expect_below(const Bound& result, double reached_ns) {
  ASSERT_LE(result.plain_ns, result.best_ns);
  ASSERT_LE(result.plain_ns, reached_ns + tolerance_ns(reached_ns));
  ASSERT_LE(result.best_ns, reached_ns + tolerance_ns(reached_ns));
}

// Links whose reduce-scatter and all-gather are sometimes cheaper than an all-reduce, sometimes only one part of them
// is.
LinkModel with_every_op(Random& random, const LinkModel& link) {
  LinkModel every = link;
  every.reduce_scatter = scaled(link, random.uniform(0.1, 1.2), random.uniform(0.1, 1.2)).all_reduce;
  every.all_gather = scaled(link, random.uniform(0.1, 1.2), random.uniform(0.1, 1.2)).all_reduce;
  return every;
}

// What the search is told, and how large the profiles may be for it.
struct Kind {
  const char* name;
  uint64_t seeds;
  int32_t unit_count_max;
  int32_t tensor_count_max;
  ExhaustiveOptions options;
  bool packing = false;
};

void PrintTo(const Kind& kind, std::ostream* out) {
  *out << kind.name;
}

class BoundOf : public ::testing::TestWithParam<Kind> {};

TEST_P(BoundOf, IsNeverAboveTheBestPlan) {
  const Kind& kind = GetParam();
  for (const Windows windows : kAllWindows) {
    for (uint64_t seed = 1; seed <= kind.seeds; ++seed) {
      SCOPED_TRACE(testing::Message() << "seed " << seed << " windows " << static_cast<int>(windows));
      GridCaseOptions grid = grid_options(windows, seed, kind.unit_count_max, kind.tensor_count_max);
      grid.packing = kind.packing;
      Profile profile = grid_case(seed, grid);
      if (kind.options.any_op) {
        Random random(seed);
        profile.link = with_every_op(random, profile.link);
      }
      ExhaustiveOptions options = kind.options;
      options.unit_bytes = kGridUnitBytes;
      for (const Mode mode : {Mode::kOverlap, Mode::kHook}) {
        options.mode = mode;
        const double best_ns = exhaustive_best(profile, profile.link, options).iteration_ns;
        expect_below(bound(profile, profile.link, {mode, options.in_flight, options.any_op}), best_ns);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, BoundOf,
                         ::testing::Values(Kind{"all_reduces", 2500, 30, 5, {}}, Kind{"packing", 60, 9, 4, {}, true},
                                           Kind{"two_in_flight", 60, 8, 4, {.in_flight = 2}},
                                           Kind{"three_in_flight", 60, 8, 4, {.in_flight = 3}},
                                           Kind{"any_op", 100, 6, 3, {.any_op = true}}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(Bound, NeverAboveRandomPlans) {
  for (const Windows windows : kAllWindows) {
    for (uint64_t seed = 1; seed <= 300; ++seed) {
      SCOPED_TRACE(testing::Message() << "seed " << seed << " windows " << static_cast<int>(windows));
      Random random(seed);
      RandomProfileOptions profile_options;
      profile_options.windows = windows;
      profile_options.tensor_count_max = 30;
      profile_options.buffer_count = seed % 4 == 0 ? 2 : 1;
      profile_options.link_piece_count = seed % 3 == 0 ? 3 : 1;
      profile_options.updates = seed % 5 < 2;
      Profile profile = random_profile(seed, profile_options);
      profile.link = with_every_op(random, profile.link);
      for (int32_t repetition = 0; repetition < 8; ++repetition) {
        RandomPlanOptions options;
        options.scatter_gather = repetition % 2 == 0;
        options.in_flight = 1 + repetition % 3;
        options.mode = random.chance(0.7) ? Mode::kOverlap : Mode::kHook;
        const Plan plan = random_plan(random, profile, options);
        const double reached_ns = play(profile, profile.link, plan).iteration_ns;
        expect_below(bound(profile, profile.link, {options.mode, options.in_flight, options.scatter_gather}),
                     reached_ns);
      }
    }
  }
}

// A bound of zero would pass all of the above: where it claims to be exact it has to be met, up to cuts that lie off
// the grid.
TEST(Bound, IsMetWhereItIsExact) {
  int32_t exact_count = 0;
  int32_t met_count = 0;
  double excess = 0;
  for (const Mode mode : {Mode::kOverlap, Mode::kHook}) {
    for (uint64_t seed = 1; seed <= 2000; ++seed) {
      GridCaseOptions options;
      options.updates = seed % 2 == 0;
      const Profile profile = grid_case(seed, options);
      const Bound result = bound(profile, profile.link, {mode});
      ASSERT_TRUE(result.exact) << "seed " << seed;
      const double best_ns = exhaustive_best(profile, profile.link, {mode, kGridUnitBytes}).iteration_ns;
      ++exact_count;
      met_count += best_ns <= result.best_ns * (1 + 1e-6);
      excess += best_ns / result.best_ns - 1;
    }
  }
  RecordProperty("met", met_count);
  EXPECT_GE(met_count, exact_count * 4 / 5);
  EXPECT_LE(excess / exact_count, 0.002);
}

}  // namespace
}  // namespace gradcast
