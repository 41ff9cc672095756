// Goal: zigzag decides exactly whether a plan with a given iteration time exists, with how many blocks, for nested
// windows. Method: examples whose optimum is known by hand, and exhaustive search on tiny seeded profiles.
#include "planner/zigzag.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "cost/problem.h"
#include "planner/window_chains.h"
#include "tests/core/planner/exhaustive.h"
#include "tests/core/planner/grid_cases.h"
#include "tests/support/seeds.h"

namespace gradcast {
namespace {

constexpr int32_t kNoLimit = std::numeric_limits<int32_t>::max();

Chain chain_of(const Profile& profile, Mode mode = Mode::kOverlap) {
  const Problem problem = make_problem(profile, profile.link, mode, 1);
  return enlarged_chain(problem, candidate_orders(problem)[0], profile.link.all_reduce);
}

// Two tensors of 1 byte, ready at 0 and 0.5, read at once: sending the first alone costs 5.0, waiting to join both 4.5.
TEST(Zigzag, WaitsToJoinWhereThatIsFaster) {
  const Chain chain{{0.5, 0}, {0, 0}, {1, 2}, 0.5, 1, linear_cost({1, 1})};
  EXPECT_NEAR(optimum(chain).reached_ns, 4.5, 1e-8);
  EXPECT_EQ(zigzag(chain, 4.5, kNoLimit)->size(), 1u);
  EXPECT_FALSE(zigzag(chain, 4.5 * (1 - 1e-6), kNoLimit).has_value());
  EXPECT_FALSE(zigzag(chain, 4.5, 0).has_value());
}

// 10 bytes ready at 0 and read at 10, 1 byte ready at 5 and read at once: all together 23, cut so that the link is free
// for the last byte 17.
TEST(Zigzag, CutsALargeTensorSoThatTheLastOneDoesNotWait) {
  const Chain chain{{5, 0}, {0, 10}, {1, 11}, 5, 10, linear_cost({1, 1})};
  EXPECT_NEAR(optimum(chain).reached_ns, 17, 1e-7);
  const auto slots = *zigzag(chain, 17, kNoLimit);
  ASSERT_GE(slots.size(), 2u);
  EXPECT_EQ(slots[0].side, Side::kBackward);
  EXPECT_DOUBLE_EQ(slots[0].start_ns, 0);
  EXPECT_DOUBLE_EQ(slots[0].finish_ns, 5);
}

TEST(Zigzag, WithoutAlphaTheOptimumIsThePlainBound) {
  const Chain chain{{8, 5, 1}, {0, 2, 3}, {4, 9, 20}, 9, 5, linear_cost({0, 0.7})};
  EXPECT_DOUBLE_EQ(optimum(chain).reached_ns, plain_bound_ns(chain));
}

TEST(Zigzag, ALinkWithoutBetaNeedsOneAlpha) {
  const Chain chain{{8, 1}, {0, 2}, {4, 9}, 9, 5, linear_cost({3, 0})};
  EXPECT_NEAR(optimum(chain).reached_ns, 8 + 3 + 5, 1e-7);
  EXPECT_EQ(zigzag(chain, 16, kNoLimit)->size(), 1u);
}

// Slots follow one another in time, start no earlier than what they carry is ready, end by its deadline, and hold their
// bytes.
TEST(Zigzag, SlotsHoldTheirBytesInsideTheirWindows) {
  for (uint64_t seed = 0; seed < seed_count(2000); ++seed) {
    SCOPED_TRACE(seed);
    const Profile profile = random_profile(seed, {.tensor_count_max = 40});
    const Chain chain = chain_of(profile);
    const double iteration_ns = optimum(chain).reached_ns;
    const auto slots = *zigzag(chain, iteration_ns, kNoLimit);
    const double rounding_ns = 1e-9 * iteration_ns;
    double covered_bytes = 0;
    for (size_t s = 0; s < slots.size(); ++s) {
      const TimeSlot& slot = slots[s];
      covered_bytes += slot.hi_bytes - slot.lo_bytes;
      EXPECT_LE(slot.hi_bytes - slot.lo_bytes,
                divisible_capacity_bytes(chain.cost, slot.finish_ns - slot.start_ns) * (1 + 1e-9) + 1e-6);
      if (s > 0) {
        EXPECT_LE(slots[s - 1].finish_ns, slot.start_ns + rounding_ns);
      }
      // The most urgent tensor inside decides both: windows are nested.
      const auto first =
          std::upper_bound(chain.end_bytes.begin(), chain.end_bytes.end(), slot.lo_bytes) - chain.end_bytes.begin();
      ASSERT_LT(first, chain.tensor_count());
      EXPECT_GE(slot.start_ns, chain.ready_ns[first] - rounding_ns);
      EXPECT_LE(slot.finish_ns, iteration_ns - chain.forward_ns + chain.need_ns[first] + rounding_ns);
    }
    EXPECT_NEAR(covered_bytes, chain.end_bytes.back(), 1e-6 * chain.end_bytes.back());
  }
}

TEST(Zigzag, NeverUsesMoreBlocksThanExhaustiveSearch) {
  for (uint64_t seed = 0; seed < seed_count(1500); ++seed) {
    SCOPED_TRACE(seed);
    const Profile profile = grid_case(seed, {.tensor_count_max = 4, .unit_count_max = 9});
    const double iteration_ns = exhaustive_best(profile, profile.link, {Mode::kOverlap, kGridUnitBytes}).iteration_ns;
    for (const double slack : {1.0, 1.01, 1.1}) {
      const ExhaustivePlan fewest =
          exhaustive_fewest(profile, profile.link, {Mode::kOverlap, kGridUnitBytes}, iteration_ns * slack);
      const auto slots = zigzag(chain_of(profile), iteration_ns * slack * (1 + 1e-12), kNoLimit);
      ASSERT_TRUE(slots.has_value());
      ASSERT_LE(slots->size(), fewest.blocks.size());
    }
  }
}

}  // namespace
}  // namespace gradcast
