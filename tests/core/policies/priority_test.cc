// The policies that cut tensors and send the most urgent part: p3, bytescheduler. Blocks are worked out by hand.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>

#include "policies/bytescheduler.h"
#include "policies/p3.h"
#include "tests/core/policies/policy_cases.h"
#include "tests/core/profiles.h"
#include "tests/support/refusals.h"

namespace gradcast {
namespace {

// Slices of 2 bytes take 3 ns.
TEST(P3, UrgentSlicesOvertakeAtSliceBoundaries) {
  EXPECT_EQ(shown(p3(problem_of({{2, 3}, {6, 0}}), {.slice_elements = 2})),
            (Shown{"0:[2,4)", "0:[0,2)", "0:[4,6)", "0:[6,8)"}));
  EXPECT_EQ(shown(p3(problem_of({{2, 3.5}, {6, 0}}), {.slice_elements = 2})),
            (Shown{"0:[2,4)", "0:[4,6)", "0:[0,2)", "0:[6,8)"}));
  EXPECT_EQ(shown(p3(problem_of({{3, 50}, {5, 0}}), {.slice_elements = 4})), (Shown{"0:[3,7)", "0:[7,8)", "0:[0,3)"}));
}

TEST(P3, WhatIsInFlightCannotBeOvertaken) {
  EXPECT_EQ(shown(p3(problem_of({{2, 3}, {6, 0}}, {.in_flight = 2}), {.slice_elements = 2})),
            (Shown{"0:[2,4)", "0:[4,6)", "0:[0,2)", "0:[6,8)"}));
}

TEST(P3, PrioritiesHoldInHookModeAndAcrossBuffers) {
  EXPECT_EQ(shown(p3(problem_of({{2, 3, 7, 0, 1}, {6, 0, 9, 0, 0}}, {.mode = Mode::kHook}), {.slice_elements = 2})),
            (Shown{"0:[0,2)", "1:[0,2)", "0:[2,4)", "0:[4,6)"}));
}

TEST(P3, SlicesAreCountedInElements) {
  Profile profile = profile_of({{12, 0}});
  profile.tensors[0].element_bytes = 4;
  const Problem problem = make_problem(profile, profile.link, Mode::kOverlap, 1);
  EXPECT_EQ(shown(p3(problem, {.slice_elements = 2})), (Shown{"0:[0,8)", "0:[8,12)"}));
  EXPECT_EQ(shown(p3(problem, {.slice_elements = kBytesMax})), (Shown{"0:[0,12)"}));
}

TEST(P3, RefusesAMillionSlices) {
  const Problem problem = problem_of({{2'000'002, 0}});
  expect_refused([&] { p3(problem, {.slice_elements = 2}); }, ErrorCode::kInvalidOption,
                 "the plan would have 1000001 blocks, above the limit of 1000000; raise slice_elements");
}

// Chunks of 2 bytes take 3 ns; the urgent tensor is ready when the first is through.
TEST(Bytescheduler, TheCreditSaysHowManyBytesAreFixedAhead) {
  const Problem problem = problem_of({{2, 3}, {6, 0}});
  const Shown one_ahead = {"0:[2,4)", "0:[0,2)", "0:[4,6)", "0:[6,8)"};
  const Shown two_ahead = {"0:[2,4)", "0:[4,6)", "0:[0,2)", "0:[6,8)"};
  const Shown three_ahead = {"0:[2,4)", "0:[4,6)", "0:[6,8)", "0:[0,2)"};
  const auto with_credit = [&](int64_t credit_bytes) {
    return shown(bytescheduler(problem, {.partition_bytes = 2, .credit_bytes = credit_bytes}));
  };
  EXPECT_EQ(with_credit(1), one_ahead);  // below zero by one chunk
  EXPECT_EQ(with_credit(2), one_ahead);
  EXPECT_EQ(with_credit(3), two_ahead);
  EXPECT_EQ(with_credit(4), two_ahead);
  EXPECT_EQ(with_credit(5), three_ahead);
}

TEST(Bytescheduler, ReturnedCreditIsSpentAtOnce) {
  // Two chunks ahead; at 3 one comes back and the next of the same tensor is fixed, before the urgent one is ready at
  // 4.
  EXPECT_EQ(shown(bytescheduler(problem_of({{2, 4}, {8, 0}}), {.partition_bytes = 2, .credit_bytes = 4})),
            (Shown{"0:[2,4)", "0:[4,6)", "0:[6,8)", "0:[0,2)", "0:[8,10)"}));
}

TEST(Bytescheduler, CutsAtWholeElements) {
  Profile profile = profile_of({{12, 0}});
  profile.tensors[0].element_bytes = 4;
  const Problem problem = make_problem(profile, profile.link, Mode::kOverlap, 1);
  EXPECT_EQ(shown(bytescheduler(problem, {.partition_bytes = 11, .credit_bytes = 1})), (Shown{"0:[0,8)", "0:[8,12)"}));
}

TEST(Bytescheduler, TheTunerTakesTheBestOfItsGrid) {
  constexpr int64_t kMB = 1'000'000;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Profile profile = random_profile(seed, {.tensor_count_min = 20, .tensor_count_max = 40, .bytes_min = kMB});
    const Problem problem = make_problem(profile, profile.link, Mode::kOverlap, 1);
    const auto value = [&](const ByteschedulerOptions& options) {
      return iteration_ns(problem, bytescheduler(problem, options));
    };
    double best_ns = std::numeric_limits<double>::infinity();
    double best_at_16_ns = std::numeric_limits<double>::infinity();
    for (const int64_t partition : {4, 8, 16, 32, 64, 128}) {
      best_at_16_ns = std::min(best_at_16_ns, value({.partition_bytes = partition * kMB, .credit_bytes = 16 * kMB}));
      for (const int64_t credit : {16, 32, 64, 128, 256}) {
        best_ns = std::min(best_ns, value({.partition_bytes = partition * kMB, .credit_bytes = credit * kMB}));
      }
    }
    EXPECT_DOUBLE_EQ(value({}), best_ns);
    EXPECT_DOUBLE_EQ(value({.credit_bytes = 16 * kMB}), best_at_16_ns);
  }
}

TEST(Bytescheduler, RefusesAMillionChunksAndTunesAroundThem) {
  expect_refused(
      [] {
        bytescheduler(problem_of({{1'000'001, 0}}), {.partition_bytes = 1});
      },
      ErrorCode::kInvalidOption,
      "the plan would have 1000001 blocks, above the limit of 1000000; raise partition_bytes");
  const Problem huge = problem_of({{10'000'000'000'000, 0}});  // 2.5 million chunks of 4 MB
  EXPECT_LE(bytescheduler(huge, {}).size(), 1'000'000u);
}

}  // namespace
}  // namespace gradcast
