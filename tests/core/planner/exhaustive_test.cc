// The oracle itself: known optima, two searches that share no argument agree, and every plan found is a plan that
// play() gives the time that the search claims.
#include "tests/core/planner/exhaustive.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "gradcast/play.h"
#include "tests/core/hand_profiles.h"
#include "tests/core/planner/grid_cases.h"

namespace gradcast {
namespace {

using Windows = RandomProfileOptions::Windows;

double best_ns(const Profile& profile, const LinkModel& link, Mode mode = Mode::kOverlap) {
  return exhaustive_best(profile, link, {mode, 1}).iteration_ns;
}

TEST(Exhaustive, WaitsToJoinWhereThatIsShorter) {
  EXPECT_DOUBLE_EQ(best_ns(profile_of(0.5, 1, {{1, 0.5, 0}, {1, 0, 0}}), link_of(1, 1)), 4.5);
}

TEST(Exhaustive, StopsForTheLastBurst) {
  EXPECT_DOUBLE_EQ(best_ns(profile_of(5, 10, {{1, 5, 0}, {10, 0, 10}}), link_of(1, 1)), 17);
}

TEST(Exhaustive, RunsOverABurstThatIsNotTheLast) {
  EXPECT_DOUBLE_EQ(best_ns(profile_of(10, 1, {{1, 10, 0}, {1, 5, 0}, {10, 0, 0}}), link_of(1, 1)), 15);
}

TEST(Exhaustive, JoinsDistantRangesOnlyWhereThatIsFree) {
  const Profile profile = profile_of(10, 3, {{1, 0, 0}, {1, 10, 1}, {1, 0, 2}});
  LinkModel link = link_of(5, 1);
  EXPECT_DOUBLE_EQ(best_ns(profile, link), 18);
  link.pack_ns_per_byte = 1000;
  EXPECT_DOUBLE_EQ(best_ns(profile, link), 19);
}

TEST(Exhaustive, UsesTheCheapPieceTwice) {
  LinkModel link;
  link.all_reduce.pieces = {{10, 1, 1}, {kUnboundedBytes, 5, 1}};
  const ExhaustivePlan plan = exhaustive_best(profile_of(0, 0, {{20, 0, 0}}), link, {Mode::kOverlap, 1});
  EXPECT_DOUBLE_EQ(plan.iteration_ns, 22);
  EXPECT_EQ(plan.blocks.size(), 2U);
}

TEST(Exhaustive, HookModeHasNoTails) {
  // Overlap: the second tensor hides behind 6 of forward. Hook: everything, then forward.
  const Profile profile = profile_of(2, 6, {{1, 2, 0}, {3, 2, 6}});
  EXPECT_DOUBLE_EQ(best_ns(profile, link_of(1, 1)), 10);
  EXPECT_DOUBLE_EQ(best_ns(profile, link_of(1, 1), Mode::kHook), 13);
}

TEST(Exhaustive, UpdatesOfTheMoreUrgentCoverTheLessUrgent) {
  // Ready at 0 = B. One block each: the first arrives at 2, is updated until 5, forward needs the second at 5: it is
  // there.
  const Profile profile = profile_of(0, 1, {{1, 0, 0, 3}, {2, 0, 0, 4}});
  EXPECT_DOUBLE_EQ(best_ns(profile, link_of(1, 1)), 2 + 3 + 4 + 1);
  EXPECT_DOUBLE_EQ(best_ns(profile, link_of(1, 1), Mode::kHook), 4 + 3 + 4 + 1);
}

TEST(Exhaustive, TwoBuffersNeverShareABlock) {
  Profile profile = profile_of(0, 0, {{1, 0, 0}, {1, 0, 0}});
  EXPECT_DOUBLE_EQ(best_ns(profile, link_of(5, 1)), 7);
  profile.tensors[1].buffer = 1;
  EXPECT_DOUBLE_EQ(best_ns(profile, link_of(5, 1)), 12);
}

TEST(Exhaustive, FewestBlocksPayWithTime) {
  const Profile profile = profile_of(5, 10, {{1, 5, 0}, {10, 0, 10}});
  const auto fewest = [&](double iteration_ns_max) {
    return exhaustive_fewest(profile, link_of(1, 1), {Mode::kOverlap, 1}, iteration_ns_max);
  };
  EXPECT_TRUE(fewest(16.99).blocks.empty());
  EXPECT_EQ(fewest(16.99).iteration_ns, std::numeric_limits<double>::infinity());
  EXPECT_EQ(fewest(17).blocks.size(), 3U);
  // Two blocks: the small tensor from 5 to 7, the large one from 7 to 18, where forward ends too.
  EXPECT_EQ(fewest(17.99).blocks.size(), 3U);
  EXPECT_EQ(fewest(18).blocks.size(), 2U);
  EXPECT_EQ(fewest(26.99).blocks.size(), 2U);
  EXPECT_EQ(fewest(27).blocks.size(), 1U);
}

TEST(Exhaustive, WholeTensorBuckets) {
  // Ready order: third, second, first. Buckets {2}{1}{0}: 2, 4, 7; {2,1}{0}: 5, 7; {2}{1,0}: 2, 8; {2,1,0}: 9.
  const Profile profile = profile_of(5, 1, {{1, 5, 0}, {1, 2, 0}, {1, 0, 0}});
  EXPECT_DOUBLE_EQ(best_whole_tensor_buckets_ns(profile, link_of(1, 1)), 7 + 1);
  // {2}{1}{0}: 4, 8, 12; {2,1}{0}: 2 + 5, 11; {2}{1,0}: 4, 10; {2,1,0}: 5 + 6.
  EXPECT_DOUBLE_EQ(best_whole_tensor_buckets_ns(profile, link_of(3, 1)), 10 + 1);
  // Neighbours in ready order that are none in the buffer pay for packing: only {2,0} does, so {1,2,0} or single ones
  // win.
  const Profile crossed = profile_of(5, 0, {{1, 5, 0}, {1, 0, 0}, {1, 5, 1}});
  LinkModel link = link_of(3, 1);
  EXPECT_DOUBLE_EQ(best_whole_tensor_buckets_ns(crossed, link), 10);
  link.pack_ns_per_byte = 100;
  EXPECT_DOUBLE_EQ(best_whole_tensor_buckets_ns(crossed, link), 11);
}

// Every combination of windows, mode, buffers, pieces, updates; small enough for the search over sets.
struct Sweep {
  GridCaseOptions options;
  Mode mode;
};

std::vector<Sweep> sweeps(int32_t unit_count_max, int32_t tensor_count_max, bool packing) {
  std::vector<Sweep> all;
  for (const Windows windows : {Windows::kNested, Windows::kDisturbed, Windows::kRandom}) {
    for (const Mode mode : {Mode::kOverlap, Mode::kHook}) {
      for (const int32_t buffer_count : {1, 2}) {
        for (const int32_t piece_count : {1, 3}) {
          all.push_back(
              {{windows, tensor_count_max, unit_count_max, buffer_count, piece_count, piece_count == 3, packing},
               mode});
        }
      }
    }
  }
  return all;
}

void expect_played(const Profile& profile, const ExhaustiveOptions& options, const ExhaustivePlan& found) {
  Plan plan;
  plan.mode = options.mode;
  plan.in_flight = options.in_flight;
  plan.blocks = found.blocks;
  ASSERT_NO_THROW(check_plan(plan, profile));
  EXPECT_NEAR(play(profile, profile.link, plan).iteration_ns, found.iteration_ns, 1e-9 * found.iteration_ns);
}

TEST(Exhaustive, CountsAndSubsetsAgree) {
  for (const Sweep& sweep : sweeps(9, 4, false)) {
    for (uint64_t seed = 1; seed <= 40; ++seed) {
      SCOPED_TRACE(testing::Message() << "seed " << seed << " windows " << static_cast<int>(sweep.options.windows));
      const Profile profile = grid_case(seed, sweep.options);
      const ExhaustiveOptions options{sweep.mode, kGridUnitBytes};
      const ExhaustivePlan best = exhaustive_best(profile, profile.link, options);
      const ExhaustivePlan other = exhaustive_best_by_subsets(profile, profile.link, options);
      ASSERT_NEAR(best.iteration_ns, other.iteration_ns, 1e-9 * other.iteration_ns);
      expect_played(profile, options, best);
      expect_played(profile, options, other);
      for (const double slack : {1.0 + 1e-9, 1.002, 1.05, 1.5}) {
        const double limit_ns = slack * best.iteration_ns;
        const ExhaustivePlan few = exhaustive_fewest(profile, profile.link, options, limit_ns);
        const ExhaustivePlan few_other = exhaustive_fewest_by_subsets(profile, profile.link, options, limit_ns);
        ASSERT_EQ(few.blocks.size(), few_other.blocks.size()) << "slack " << slack;
        ASSERT_LE(few.iteration_ns, limit_ns);
        expect_played(profile, options, few);
        expect_played(profile, options, few_other);
      }
      EXPECT_TRUE(exhaustive_fewest(profile, profile.link, options, 0.999999 * best.iteration_ns).blocks.empty());
    }
  }
}

TEST(Exhaustive, PlansOnLargerGridsAreWhatPlaySays) {
  for (const Sweep& sweep : sweeps(30, 5, false)) {
    for (uint64_t seed = 1; seed <= 60; ++seed) {
      SCOPED_TRACE(testing::Message() << "seed " << seed << " windows " << static_cast<int>(sweep.options.windows));
      const Profile profile = grid_case(seed, sweep.options);
      const ExhaustiveOptions options{sweep.mode, kGridUnitBytes};
      const ExhaustivePlan best = exhaustive_best(profile, profile.link, options);
      expect_played(profile, options, best);
      const ExhaustivePlan few = exhaustive_fewest(profile, profile.link, options, 1.002 * best.iteration_ns);
      expect_played(profile, options, few);
      EXPECT_LE(few.blocks.size(), best.blocks.size());
    }
  }
}

TEST(Exhaustive, MoreInFlightHidesStartUp) {
  // Two blocks of one: [0,4] and [4,8]; the second start-up beside the first block's bytes: 4 and 5.
  const Profile profile = profile_of(0, 0, {{1, 0, 0}, {1, 0, 0}});
  LinkModel link = link_of(3, 1);
  EXPECT_DOUBLE_EQ(exhaustive_best(profile, link, {Mode::kHook, 1, 1}).iteration_ns, 5);  // joined
  Profile apart = profile;
  apart.tensors[1].buffer = 1;
  EXPECT_DOUBLE_EQ(exhaustive_best(apart, link, {Mode::kHook, 1, 1}).iteration_ns, 8);
  EXPECT_DOUBLE_EQ(exhaustive_best(apart, link, {Mode::kHook, 1, 2}).iteration_ns, 5);
}

TEST(Exhaustive, MoreInFlightIsNeverWorse) {
  for (const Sweep& sweep : sweeps(7, 3, true)) {
    for (uint64_t seed = 1; seed <= 10; ++seed) {
      SCOPED_TRACE(testing::Message() << "seed " << seed << " windows " << static_cast<int>(sweep.options.windows));
      const Profile profile = grid_case(seed, sweep.options);
      double previous_ns = std::numeric_limits<double>::infinity();
      for (const int32_t in_flight : {1, 2, 3}) {
        const ExhaustiveOptions options{sweep.mode, kGridUnitBytes, in_flight};
        const ExhaustivePlan best = exhaustive_best(profile, profile.link, options);
        expect_played(profile, options, best);
        EXPECT_LE(best.iteration_ns, previous_ns);
        const ExhaustivePlan few = exhaustive_fewest(profile, profile.link, options, 1.01 * best.iteration_ns);
        expect_played(profile, options, few);
        EXPECT_LE(few.blocks.size(), best.blocks.size());
        previous_ns = best.iteration_ns;
      }
    }
  }
}

TEST(Exhaustive, ScatterAndGatherWhereTheyAreCheaper) {
  // 4 bytes ready at 0, backward ends at 6. All-reduce: from 0 to 9. Scatter from 0 to 5, gather from 5 to 8.
  const Profile profile = profile_of(6, 0, {{4, 0, 0}});
  LinkModel link = link_of(1, 2);
  EXPECT_DOUBLE_EQ(exhaustive_best_any_op(profile, link, {Mode::kOverlap, 1}).iteration_ns, 9);
  link.reduce_scatter.pieces = {{kUnboundedBytes, 1, 1}};
  link.all_gather.pieces = {{kUnboundedBytes, 1, 0.5}};
  const ExhaustivePlan plan = exhaustive_best_any_op(profile, link, {Mode::kOverlap, 1});
  EXPECT_DOUBLE_EQ(plan.iteration_ns, 8);
  ASSERT_EQ(plan.blocks.size(), 2U);
  EXPECT_EQ(plan.blocks[0].op, Op::kReduceScatter);
  EXPECT_EQ(plan.blocks[1].op, Op::kAllGather);
}

TEST(Exhaustive, AnyOpIsNeverWorse) {
  for (const Sweep& sweep : sweeps(6, 3, true)) {
    for (uint64_t seed = 1; seed <= 10; ++seed) {
      SCOPED_TRACE(testing::Message() << "seed " << seed << " windows " << static_cast<int>(sweep.options.windows));
      Profile profile = grid_case(seed, sweep.options);
      const ExhaustiveOptions options{sweep.mode, kGridUnitBytes};
      const double all_reduce_ns = exhaustive_best(profile, profile.link, options).iteration_ns;
      EXPECT_NEAR(exhaustive_best_any_op(profile, profile.link, options).iteration_ns, all_reduce_ns,
                  1e-9 * all_reduce_ns);
      Random random(seed);
      profile.link.reduce_scatter = scaled(profile.link, random.uniform(0.2, 1), random.uniform(0.2, 1)).all_reduce;
      profile.link.all_gather = scaled(profile.link, random.uniform(0.2, 1), random.uniform(0.2, 1)).all_reduce;
      const ExhaustivePlan best = exhaustive_best_any_op(profile, profile.link, options);
      expect_played(profile, options, best);
      EXPECT_LE(best.iteration_ns, all_reduce_ns * (1 + 1e-12));
    }
  }
}

TEST(Exhaustive, PackingNeverHelps) {
  for (const Sweep& sweep : sweeps(9, 4, true)) {
    for (uint64_t seed = 1; seed <= 10; ++seed) {
      SCOPED_TRACE(testing::Message() << "seed " << seed << " windows " << static_cast<int>(sweep.options.windows));
      const Profile profile = grid_case(seed, sweep.options);
      const ExhaustiveOptions options{sweep.mode, kGridUnitBytes};
      const ExhaustivePlan best = exhaustive_best(profile, profile.link, options);
      expect_played(profile, options, best);
      LinkModel free = profile.link;
      free.pack_ns_per_byte = 0;
      EXPECT_GE(best.iteration_ns, exhaustive_best(profile, free, options).iteration_ns * (1 - 1e-12));
      expect_played(profile, options, exhaustive_fewest(profile, profile.link, options, 1.002 * best.iteration_ns));
    }
  }
}

}  // namespace
}  // namespace gradcast
