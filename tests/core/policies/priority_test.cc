// The policies that cut tensors and send the most urgent part: p3, bytescheduler. Blocks are worked out by hand.
#include <gtest/gtest.h>

#include "policies/published.h"
#include "tests/core/policies/policy_cases.h"

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

}  // namespace
}  // namespace gradcast
