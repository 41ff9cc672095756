// The policies that fuse whole tensors: fifo, fsdp, ddp, mgwfbp, dear. Blocks are worked out by hand.
#include <gtest/gtest.h>

#include "policies/published.h"
#include "tests/core/policies/policy_cases.h"

namespace gradcast {
namespace {

TEST(Fifo, OneBlockPerTensorInReadyOrder) {
  EXPECT_EQ(shown(fifo(problem_of({{2, 4}, {3, 2}, {5, 1}}), {})), (Shown{"0:[5,10)", "0:[2,5)", "0:[0,2)"}));
  // Ready together: the less urgent first, as backward makes them.
  EXPECT_EQ(shown(fifo(problem_of({{2, 4}, {3, 4}}), {})), (Shown{"0:[2,5)", "0:[0,2)"}));
  // Ready in forward's order, in two buffers.
  EXPECT_EQ(shown(fifo(problem_of({{2, 1, 0, 0, 1}, {3, 2, 0, 0, 0}, {4, 3, 0, 0, 1}}), {})),
            (Shown{"1:[0,2)", "0:[0,3)", "1:[2,6)"}));
}

TEST(Fsdp, OneBlockForWhatIsReadyTogether) {
  EXPECT_EQ(shown(fsdp(problem_of({{2, 4}, {3, 4}, {5, 1}, {1, 1}}), {})), (Shown{"0:[5,11)", "0:[0,5)"}));
  // Alone, as with fifo.
  EXPECT_EQ(shown(fsdp(problem_of({{2, 4}, {3, 2}}), {})), (Shown{"0:[2,5)", "0:[0,2)"}));
  // Of several buffers, one block each.
  EXPECT_EQ(shown(fsdp(problem_of({{2, 1, 0, 0, 0}, {3, 1, 0, 0, 1}, {4, 1, 0, 0, 0}}), {})),
            (Shown{"0:[0,6)", "1:[0,3)"}));
}

TEST(Ddp, BucketsCloseWhenTheirCapIsReached) {
  const std::vector<Item> rows = {{2, 4}, {3, 3}, {1, 2}, {1, 1}};
  // 1 reaches 1; 1 + 3 reaches 4; 2 is what is left.
  EXPECT_EQ(shown(ddp(problem_of(rows), {.first_bytes = 1, .cap_bytes = 4})), (Shown{"0:[6,7)", "0:[2,6)", "0:[0,2)"}));
  // A bucket may exceed its cap: 1 + 1 is below 3, 1 + 1 + 3 above.
  EXPECT_EQ(shown(ddp(problem_of(rows), {.first_bytes = 3, .cap_bytes = 4})), (Shown{"0:[2,7)", "0:[0,2)"}));
  // Nothing is left over.
  EXPECT_EQ(shown(ddp(problem_of(rows), {.first_bytes = 5, .cap_bytes = 2})), (Shown{"0:[2,7)", "0:[0,2)"}));
  EXPECT_EQ(shown(ddp(problem_of(rows), {.first_bytes = 7, .cap_bytes = 7})), (Shown{"0:[0,7)"}));
}

TEST(Ddp, DefaultsAreTorchs) {
  constexpr int64_t kMiB = 1 << 20;
  const Problem problem = problem_of({{2 * kMiB, 5}, {13 * kMiB, 4}, {12 * kMiB, 3}, {kMiB / 2, 2}, {kMiB / 2, 1}});
  EXPECT_EQ(shown(ddp(problem, {})), (Shown{"0:[28311552,29360128)", "0:[2097152,28311552)", "0:[0,2097152)"}));
}

TEST(Ddp, BuffersFillBucketsOfTheirOwn) {
  const std::vector<Item> rows = {{2, 4, 0, 0, 0}, {2, 3, 0, 0, 1}, {2, 2, 0, 0, 0}, {2, 1, 0, 0, 1}};
  // Numbered as they close: buffer 1 has its second tensor first. The caps run per buffer.
  EXPECT_EQ(shown(ddp(problem_of(rows), {.first_bytes = 4, .cap_bytes = 4})), (Shown{"1:[0,4)", "0:[0,4)"}));
  EXPECT_EQ(shown(ddp(problem_of(rows), {.first_bytes = 2, .cap_bytes = 4})),
            (Shown{"1:[2,4)", "0:[2,4)", "1:[0,2)", "0:[0,2)"}));
  // A closed bucket comes before one that never closes, though it is complete later.
  EXPECT_EQ(shown(ddp(problem_of({{4, 4, 0, 0, 0}, {2, 3, 0, 0, 1}}), {.first_bytes = 4, .cap_bytes = 4})),
            (Shown{"0:[0,4)", "1:[0,2)"}));
}

TEST(Ddp, TensorsThatAreNotNeighboursShareABucket) {
  const Problem problem = problem_of({{2, 1}, {3, 9}, {4, 2}});
  EXPECT_EQ(shown(ddp(problem, {.first_bytes = 6, .cap_bytes = 6})), (Shown{"0:[0,2)[5,9)", "0:[2,5)"}));
}

TEST(Mgwfbp, MergesWhereTheStartIsLessThanAlphaAgo) {
  // Alpha 2. The first would run from 1 to 4; the second is ready at 2, and 2 - 1 < 2. The third comes after both.
  EXPECT_EQ(shown(mgwfbp(problem_of({{1, 10}, {1, 2}, {1, 1}}, {.alpha_ns = 2}), {})), (Shown{"0:[1,3)", "0:[0,1)"}));
  // 3 - 1 is not less than 2.
  EXPECT_EQ(shown(mgwfbp(problem_of({{1, 10}, {1, 3}, {2, 1}}, {.alpha_ns = 2}), {})),
            (Shown{"0:[2,4)", "0:[1,2)", "0:[0,1)"}));
  // Less than alpha ago, but the link is free by then: from 1 to 1.5, ready at 1.5.
  EXPECT_EQ(shown(mgwfbp(problem_of({{1, 1.5}, {1, 1}}, {.alpha_ns = 0.5, .beta_ns_per_byte = 0}), {})),
            (Shown{"0:[1,2)", "0:[0,1)"}));
}

TEST(Mgwfbp, MergesWhatWaitsForTheLink) {
  // The first runs from 0 to 12. The next two are ready at 5 and 8 and wait anyway; the last comes at 20, when they,
  // sent from 12 to 16, are through.
  EXPECT_EQ(shown(mgwfbp(problem_of({{1, 20}, {1, 8}, {1, 5}, {10, 0}}, {.alpha_ns = 2}), {})),
            (Shown{"0:[3,13)", "0:[1,3)", "0:[0,1)"}));
  // A merged group pays one start-up: it runs from 2 to 6, the next from 6 on, and 8.5 is too late to join that.
  EXPECT_EQ(shown(mgwfbp(problem_of({{1, 8.5}, {1, 4.5}, {1, 2}, {1, 1}}, {.alpha_ns = 2}), {})),
            (Shown{"0:[2,4)", "0:[1,2)", "0:[0,1)"}));
  // A merged group is ready with its last tensor, so a third may join within alpha of that.
  EXPECT_EQ(shown(mgwfbp(problem_of({{1, 4}, {1, 2.5}, {1, 1}}, {.alpha_ns = 2}), {})), (Shown{"0:[0,3)"}));
}

TEST(Mgwfbp, AGroupSpansBuffers) {
  EXPECT_EQ(shown(mgwfbp(problem_of({{1, 10, 0, 0, 1}, {1, 1, 0, 0, 0}, {1, 1, 0, 0, 1}, {1, 1, 0, 0, 0}}), {})),
            (Shown{"0:[0,2)", "1:[1,2)", "1:[0,1)"}));
}

TEST(Dear, ScattersAsGroupsCompleteAndGathersInForwardOrder) {
  const std::vector<Item> rows = {{2, 4}, {2, 3}, {3, 2}, {9, 1}, {1, 0}};
  // A group may reach the size, not exceed it; a larger tensor is alone.
  EXPECT_EQ(shown(dear(problem_of(rows), {.fusion_bytes = 4})),
            (Shown{"rs 0:[16,17)", "rs 0:[7,16)", "rs 0:[4,7)", "rs 0:[0,4)", "ag 0:[0,4)", "ag 0:[4,7)", "ag 0:[7,16)",
                   "ag 0:[16,17)"}));
  EXPECT_EQ(shown(dear(problem_of(rows), {.fusion_bytes = 17})), (Shown{"rs 0:[0,17)", "ag 0:[0,17)"}));
}

TEST(Dear, AGroupIsReadyWithItsLastTensor) {
  // The first group waits for tensor 0, which is ready after all others.
  EXPECT_EQ(shown(dear(problem_of({{1, 9}, {1, 1}, {1, 3}, {1, 2}}), {.fusion_bytes = 2})),
            (Shown{"rs 0:[2,4)", "rs 0:[0,2)", "ag 0:[0,2)", "ag 0:[2,4)"}));
  // Ready together: the less urgent first.
  EXPECT_EQ(shown(dear(problem_of({{1, 5}, {1, 5}}), {.fusion_bytes = 1})),
            (Shown{"rs 0:[1,2)", "rs 0:[0,1)", "ag 0:[0,1)", "ag 0:[1,2)"}));
}

TEST(Dear, GroupsStayInTheirBuffer) {
  EXPECT_EQ(shown(dear(problem_of({{1, 4, 0, 0, 1}, {1, 3, 0, 0, 0}, {1, 2, 0, 0, 1}, {1, 1, 0, 0, 0}}),
                       {.fusion_bytes = 2})),
            (Shown{"rs 0:[0,2)", "rs 1:[0,2)", "ag 1:[0,2)", "ag 0:[0,2)"}));
}

}  // namespace
}  // namespace gradcast
