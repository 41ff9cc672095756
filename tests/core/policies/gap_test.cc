// The policies that size blocks by the time until the next gradients: prophet, dcredit, usbyte. Blocks are worked out
// by hand.
#include <gtest/gtest.h>

#include <string>

#include "policies/online.h"
#include "policies/published.h"
#include "tests/core/policies/policy_cases.h"
#include "tests/core/profiles.h"

namespace gradcast {
namespace {

// The staircase of ResNet-50 that Prophet publishes: 157 gradients, numbered from the first layer; backward makes them
// from 156 down to 0 and pauses for the given times after each boundary (the last pause is after all of them).
constexpr int32_t kGradientCount = 157;
constexpr int32_t kBoundaries[] = {156, 143, 130, 117, 103, 90, 77, 62, 50, 35, 22, 9, -1};
constexpr double kPausesMs[] = {16, 15, 9, 10, 12, 18, 15, 21, 30, 25, 20, 5};

std::vector<Item> staircase(double between_ns) {
  std::vector<Item> rows(kGradientCount);
  double now_ns = 1e6;
  int32_t gradient = kGradientCount - 1;
  for (size_t step = 0; step < std::size(kPausesMs); ++step) {
    for (; gradient > kBoundaries[step + 1]; --gradient) {
      rows[gradient] = {1'000'000, now_ns, static_cast<double>(gradient)};
      now_ns += between_ns;
    }
    now_ns += kPausesMs[step] * 1e6 - between_ns;
  }
  return rows;
}

TEST(Prophet, FindsThePublishedBurstsOfResnet50) {
  std::vector<int32_t> expected;
  for (size_t step = 0; step + 1 < std::size(kBoundaries); ++step) {
    expected.push_back(kGradientCount - 1 - kBoundaries[step]);  // how many gradients were before it
  }
  for (const double between_ns : {0.0, 1e3, 50e3}) {
    SCOPED_TRACE(between_ns);
    const Problem problem = problem_of(staircase(between_ns), {.backward_ns = 250e6, .forward_ns = 100e6});
    EXPECT_EQ(burst_starts(problem, by_ready(problem), ProphetOptions{}.gap_factor), expected);
  }
}

TEST(Prophet, FillsThePublishedGaps) {
  // One byte per ns: each gap carries as many million bytes as it has ms, whole gradients of one million. Burst 1 has
  // 13 and 16 ms, burst 2 has 13 and 15 ms, burst 3 has 13 and 9 ms: its 4 least urgent gradients sink.
  const Problem problem = problem_of(staircase(0), {.backward_ns = 250e6, .forward_ns = 100e6, .alpha_ns = 1e3});
  const Shown blocks = shown(prophet(problem, {}));
  const auto range = [](int32_t first, int32_t last) {
    return "[" + std::to_string(first) + "000000," + std::to_string(last + 1) + "000000)";
  };
  ASSERT_GE(blocks.size(), 5u);
  EXPECT_EQ(blocks[0], "0:" + range(144, 156));
  EXPECT_EQ(blocks[1], "0:" + range(131, 143));
  EXPECT_EQ(blocks[2], "0:" + range(118, 126));
  EXPECT_EQ(blocks[3], "0:" + range(104, 113));  // 10 ms for 14 gradients
  EXPECT_EQ(blocks[4], "0:" + range(91, 102));   // 12 ms for 13
}

TEST(Prophet, ABurstEndsAtMoreThanTwiceTheMeanGap) {
  // Gaps 1, 4, 1 with mean 2: 4 is not above twice the mean; 5 is (the mean is then 7/3).
  const Problem at = problem_of({{1, 6}, {1, 5}, {1, 1}, {1, 0}});
  EXPECT_EQ(burst_starts(at, by_ready(at), 2), (std::vector<int32_t>{0}));
  const Problem above = problem_of({{1, 7}, {1, 6}, {1, 1}, {1, 0}});
  EXPECT_EQ(burst_starts(above, by_ready(above), 2), (std::vector<int32_t>{0, 2}));
  const Problem single = problem_of({{1, 6}});
  EXPECT_EQ(burst_starts(single, by_ready(single), 2), (std::vector<int32_t>{0}));
}

// Two tensors of 4 bytes ready at 0, then one of 2 and one of 4 at 10.
std::vector<Item> two_bursts(double gap_ns) {
  return {{2, gap_ns}, {4, gap_ns}, {4, 0}, {4, 0}};
}

TEST(Prophet, OneBlockPerGapThenPriorityByCredit) {
  const auto with_credit = [](int64_t credit_bytes) {
    return shown(prophet(problem_of(two_bursts(10)), {.partition_bytes = 2, .credit_bytes = credit_bytes}));
  };
  EXPECT_EQ(with_credit(1), (Shown{"0:[6,14)", "0:[0,2)", "0:[2,4)", "0:[4,6)"}));
  EXPECT_EQ(with_credit(2), (Shown{"0:[6,14)", "0:[0,2)", "0:[2,4)", "0:[4,6)"}));
  EXPECT_EQ(with_credit(5), (Shown{"0:[6,14)", "0:[0,4)", "0:[4,6)"}));
  EXPECT_EQ(with_credit(6), (Shown{"0:[6,14)", "0:[0,6)"}));
}

TEST(Prophet, TheBudgetIsGapTimesBandwidthInWholePartitions) {
  const auto with_gap = [](double gap_ns, double alpha_ns) {
    const Problem problem = problem_of(two_bursts(gap_ns), {.alpha_ns = alpha_ns});
    return shown(prophet(problem, {.partition_bytes = 2, .credit_bytes = 1000}));
  };
  EXPECT_EQ(with_gap(8, 1), (Shown{"0:[6,14)", "0:[0,6)"}));
  EXPECT_EQ(with_gap(8, 7), (Shown{"0:[6,14)", "0:[0,6)"}));  // the start-up cost is no part of it
  EXPECT_EQ(with_gap(7.9, 1), (Shown{"0:[6,12)", "0:[0,6)[12,14)"}));
  EXPECT_EQ(with_gap(5, 1), (Shown{"0:[6,10)", "0:[0,6)[10,14)"}));
  EXPECT_EQ(with_gap(1, 1), (Shown{"0:[0,14)"}));
}

TEST(Prophet, LeftoversSinkBelowTheNextBurst) {
  // Gaps 0 4 0 4 0 with mean 8/5: bursts of two. 4 bytes fit into each gap.
  const Problem problem = problem_of({{1, 8}, {1, 8}, {3, 4}, {3, 4}, {3, 0}, {3, 0}});
  EXPECT_EQ(shown(prophet(problem, {.partition_bytes = 1, .credit_bytes = 100})),
            (Shown{"0:[8,12)", "0:[2,6)", "0:[0,2)[6,8)[12,14)"}));
}

TEST(Prophet, TheGapRunsFromCompleteBurstToCompleteBurst) {
  // Bursts at 0 … 1 and 9 … 11: from 1 to 11 the link carries 10 bytes.
  const Problem problem = problem_of({{1, 11}, {1, 9}, {6, 1}, {6, 0}});
  EXPECT_EQ(shown(prophet(problem, {.partition_bytes = 1, .credit_bytes = 100})),
            (Shown{"0:[2,12)", "0:[0,2)[12,14)"}));
}

TEST(Prophet, WithoutAStaircaseEveryInstantIsABurst) {
  const Problem problem = problem_of({{2, 6}, {2, 3}, {2, 3}, {2, 0}});
  EXPECT_EQ(shown(prophet(problem, {.partition_bytes = 1, .credit_bytes = 100})),
            (Shown{"0:[6,8)", "0:[2,5)", "0:[0,2)[5,6)"}));
}

TEST(Dcredit, FillsEachSlotWithWholeUnitsAndOneStartup) {
  const auto with_slot = [](double slot_ns) {
    return shown(dcredit(problem_of({{2, slot_ns}, {6, 0}}), {.unit_bytes = 2}));
  };
  EXPECT_EQ(with_slot(0), (Shown{"0:[0,2)", "0:[2,8)"}));               // no slot
  EXPECT_EQ(with_slot(0.5), (Shown{"0:[2,4)", "0:[0,2)", "0:[4,8)"}));  // shorter than a start-up: one unit
  EXPECT_EQ(with_slot(3), (Shown{"0:[2,4)", "0:[0,2)", "0:[4,8)"}));    // exactly one unit
  EXPECT_EQ(with_slot(4), (Shown{"0:[2,6)", "0:[0,2)", "0:[6,8)"}));    // 3 bytes: rounded up to 2 units
  EXPECT_EQ(with_slot(50), (Shown{"0:[2,8)", "0:[0,2)"}));
}

TEST(Dcredit, AnOverrunShortensTheNextSlot) {
  // The first slot sends 2 units from 0 to 5; of the second, 3 of 4 ns are left, which one unit fills.
  EXPECT_EQ(shown(dcredit(problem_of({{2, 8}, {4, 4}, {8, 0}}), {.unit_bytes = 2})),
            (Shown{"0:[6,10)", "0:[2,4)", "0:[0,2)", "0:[4,6)", "0:[10,14)"}));
}

TEST(Dcredit, ASlotTakesTheMostUrgentOfAllThatIsReady) {
  // From 4 to 10: alpha and 5 bytes: the whole of tensor 1 and a unit of tensor 2, as one operation.
  EXPECT_EQ(shown(dcredit(problem_of({{2, 10}, {4, 4}, {8, 0}}, {.alpha_ns = 2}), {.unit_bytes = 1})),
            (Shown{"0:[6,8)", "0:[2,6)", "0:[0,2)", "0:[8,14)"}));
  EXPECT_EQ(shown(dcredit(problem_of({{2, 11}, {4, 4}, {8, 0}}, {.alpha_ns = 2}), {.unit_bytes = 1})),
            (Shown{"0:[6,8)", "0:[2,6)[8,9)", "0:[0,2)", "0:[9,14)"}));
}

const UsbyteOptions kWithoutSearch = {.unit_bytes = 1, .search = false};
const UsbyteOptions kWithSearch = {.unit_bytes = 1};

TEST(Usbyte, SendsWhatFitsBeforeTheNextGradient) {
  // 3 bytes of tensor 2 until 4, then all of tensor 1 until 7; the last ns still takes one unit, which ends at 9.
  EXPECT_EQ(shown(usbyte(problem_of({{2, 8}, {2, 4}, {8, 0}}), kWithoutSearch)),
            (Shown{"0:[4,7)", "0:[2,4)", "0:[7,8)", "0:[0,2)", "0:[8,12)"}));
  // Units of 2 bytes: the 3 that fit are rounded up.
  EXPECT_EQ(shown(usbyte(problem_of({{2, 4}, {8, 0}}), {.unit_bytes = 2})), (Shown{"0:[2,6)", "0:[0,2)", "0:[6,10)"}));
}

TEST(Usbyte, ABlockGrowsWhereItsTensorGoesOn) {
  // Tensor 0 is ready first and stays on top: 3 bytes until 4, 7 until 8.
  EXPECT_EQ(shown(usbyte(problem_of({{10, 0}, {1, 4}, {1, 8}}), kWithoutSearch)),
            (Shown{"0:[0,7)", "0:[7,10)", "0:[10,11)", "0:[11,12)"}));
}

TEST(Usbyte, TheSearchLetsATensorFinishThatIsNearlyThrough) {
  // By urgency alone tensor 2 is cut after 3 of 4 bytes and costs a start-up more: the last block ends at 12, not at
  // 11.
  const Problem problem = problem_of({{2, 8}, {2, 4}, {4, 0}}, {.backward_ns = 8, .forward_ns = 1});
  const std::vector<Block> by_urgency = usbyte(problem, kWithoutSearch);
  EXPECT_EQ(shown(by_urgency), (Shown{"0:[4,7)", "0:[2,4)", "0:[7,8)", "0:[0,2)"}));
  EXPECT_EQ(iteration_ns(problem, by_urgency), 13);
  const std::vector<Block> searched = usbyte(problem, kWithSearch);
  EXPECT_EQ(shown(searched), (Shown{"0:[4,8)", "0:[2,4)", "0:[0,2)"}));
  EXPECT_EQ(iteration_ns(problem, searched), 12);
}

TEST(Usbyte, TheSearchNeverLoses) {
  int32_t won = 0;
  for (uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const auto windows = static_cast<RandomProfileOptions::Windows>(seed % 3);
    const Profile profile = random_profile(seed, {.windows = windows, .tensor_count_max = 30, .bytes_min = 100'000});
    const Problem problem = make_problem(profile, profile.link, Mode::kOverlap, 1);
    const double without_ns = iteration_ns(problem, usbyte(problem, {.search = false}));
    const double with_ns = iteration_ns(problem, usbyte(problem, {}));
    EXPECT_LE(with_ns, without_ns * (1 + 1e-12));
    won += with_ns < without_ns * (1 - 1e-9) ? 1 : 0;
  }
  EXPECT_GT(won, 30);
}

}  // namespace
}  // namespace gradcast
