// The oracle itself: known optima, two searches that share no argument agree, and every plan found is a plan that
// play() gives the time that the search claims.
#include "tests/core/planner/exhaustive.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "gradcast/play.h"
#include "tests/core/hand_profiles.h"
#include "tests/core/planner/grid_cases.h"

namespace gradcast {
namespace {

using Windows = RandomProfileOptions::Windows;

constexpr ExhaustiveOptions kHook{Mode::kHook, 1};
constexpr ExhaustiveOptions kAnyOp{.unit_bytes = 1, .any_op = true};

double best_ns(const Profile& profile, const LinkModel& link, const ExhaustiveOptions& options = {.unit_bytes = 1}) {
  return exhaustive_best(profile, link, options).iteration_ns;
}

TEST(Exhaustive, KnownOptima) {
  // Waiting to join is shorter; stopping for the last burst is; running over a burst that is not the last is.
  EXPECT_DOUBLE_EQ(best_ns(profile_of(0.5, 1, {{1, 0.5, 0}, {1, 0, 0}}), link_of(1, 1)), 4.5);
  EXPECT_DOUBLE_EQ(best_ns(profile_of(5, 10, {{1, 5, 0}, {10, 0, 10}}), link_of(1, 1)), 17);
  EXPECT_DOUBLE_EQ(best_ns(profile_of(10, 1, {{1, 10, 0}, {1, 5, 0}, {10, 0, 0}}), link_of(1, 1)), 15);
  // Overlap: the second tensor hides behind 6 of forward. Hook: everything, then forward.
  const Profile tail = profile_of(2, 6, {{1, 2, 0}, {3, 2, 6}});
  EXPECT_DOUBLE_EQ(best_ns(tail, link_of(1, 1)), 10);
  EXPECT_DOUBLE_EQ(best_ns(tail, link_of(1, 1), kHook), 13);
  // One block each: the first arrives at 2, is updated until 5, forward needs the second at 5: it is there.
  const Profile updates = profile_of(0, 1, {{1, 0, 0, 3}, {2, 0, 0, 4}});
  EXPECT_DOUBLE_EQ(best_ns(updates, link_of(1, 1)), 2 + 3 + 4 + 1);
  EXPECT_DOUBLE_EQ(best_ns(updates, link_of(1, 1), kHook), 4 + 3 + 4 + 1);
  // Two blocks on the cheap piece.
  LinkModel bent;
  bent.all_reduce.pieces = {{10, 1, 1}, {kUnboundedBytes, 5, 1}};
  EXPECT_DOUBLE_EQ(best_ns(profile_of(0, 0, {{20, 0, 0}}), bent), 22);
}

TEST(Exhaustive, JoinsDistantRangesOnlyWhereThatIsFree) {
  const Profile profile = profile_of(10, 3, {{1, 0, 0}, {1, 10, 1}, {1, 0, 2}});
  LinkModel link = link_of(5, 1);
  EXPECT_DOUBLE_EQ(best_ns(profile, link), 18);
  link.pack_ns_per_byte = 1000;
  EXPECT_DOUBLE_EQ(best_ns(profile, link), 19);
}

TEST(Exhaustive, TwoBuffersNeverShareABlockAndMoreInFlightHidesStartUp) {
  // Two blocks of one: [0,4] and [4,8]; the second start-up beside the first block's bytes: 4 and 5.
  Profile profile = profile_of(0, 0, {{1, 0, 0}, {1, 0, 0}});
  EXPECT_DOUBLE_EQ(best_ns(profile, link_of(3, 1)), 5);  // joined
  profile.tensors[1].buffer = 1;
  EXPECT_DOUBLE_EQ(best_ns(profile, link_of(3, 1)), 8);
  EXPECT_DOUBLE_EQ(best_ns(profile, link_of(3, 1), {Mode::kHook, 1, 2}), 5);
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

TEST(Exhaustive, ScatterAndGatherWhereTheyAreCheaper) {
  // 4 bytes ready at 0, backward ends at 6. All-reduce: from 0 to 9. Scatter from 0 to 5, gather from 5 to 8.
  const Profile profile = profile_of(6, 0, {{4, 0, 0}});
  LinkModel link = link_of(1, 2);
  EXPECT_DOUBLE_EQ(exhaustive_best(profile, link, kAnyOp).iteration_ns, 9);
  link.reduce_scatter = linear_cost({1, 1});
  link.all_gather = linear_cost({1, 0.5});
  const ExhaustivePlan plan = exhaustive_best(profile, link, kAnyOp);
  EXPECT_DOUBLE_EQ(plan.iteration_ns, 8);
  ASSERT_EQ(plan.blocks.size(), 2U);
  EXPECT_EQ(plan.blocks[0].op, Op::kReduceScatter);
  EXPECT_EQ(plan.blocks[1].op, Op::kAllGather);
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

// Every combination of windows, mode, buffers and pieces, each with some seeds.
void for_each_case(GridCaseOptions options, uint64_t seeds,
                   const std::function<void(uint64_t seed, const Profile&, const ExhaustiveOptions&)>& check) {
  for (int combination = 0; combination < 3 * 2 * 2 * 2; ++combination) {
    options.windows = static_cast<Windows>(combination % 3);
    options.buffer_count = 1 + combination / 3 % 2;
    options.link_piece_count = combination / 6 % 2 == 0 ? 1 : 3;
    options.updates = options.link_piece_count == 3;
    const Mode mode = combination / 12 == 0 ? Mode::kOverlap : Mode::kHook;
    for (uint64_t seed = 1; seed <= seeds; ++seed) {
      SCOPED_TRACE(testing::Message() << "seed " << seed << " combination " << combination);
      check(seed, grid_case(seed, options), {mode, kGridUnitBytes});
    }
  }
}

void expect_played(const Profile& profile, const ExhaustiveOptions& options, const ExhaustivePlan& found) {
  const Plan plan = plan_of(found.blocks, options.mode, options.in_flight);
  ASSERT_NO_THROW(check_plan(plan, profile));
  EXPECT_NEAR(play(profile, profile.link, plan).iteration_ns, found.iteration_ns, 1e-9 * found.iteration_ns);
}

TEST(Exhaustive, CountsAndSetsAgree) {
  for_each_case({.tensor_count_max = 4, .unit_count_max = 9}, 40, [](uint64_t, const Profile& profile, auto options) {
    ExhaustiveOptions by_sets = options;
    by_sets.by_sets = true;
    const ExhaustivePlan best = exhaustive_best(profile, profile.link, options);
    const ExhaustivePlan other = exhaustive_best(profile, profile.link, by_sets);
    ASSERT_NEAR(best.iteration_ns, other.iteration_ns, 1e-9 * other.iteration_ns);
    expect_played(profile, options, best);
    expect_played(profile, options, other);
    size_t block_count = best.blocks.size();
    for (const double slack : {1.0 + 1e-9, 1.002, 1.05, 1.5}) {
      const ExhaustivePlan few = exhaustive_fewest(profile, profile.link, options, slack * best.iteration_ns);
      expect_played(profile, options, few);
      ASSERT_LE(few.iteration_ns, slack * best.iteration_ns);
      ASSERT_LE(few.blocks.size(), block_count) << "slack " << slack;
      block_count = few.blocks.size();
    }
    EXPECT_TRUE(exhaustive_fewest(profile, profile.link, options, 0.999999 * best.iteration_ns).blocks.empty());
  });
}

TEST(Exhaustive, PlansOnLargerGridsAreWhatPlaySays) {
  for_each_case({}, 60, [](uint64_t, const Profile& profile, const ExhaustiveOptions& options) {
    expect_played(profile, options, exhaustive_best(profile, profile.link, options));
  });
}

}  // namespace
}  // namespace gradcast
