// What the engine says about blocks: whole sentences, with names, sizes and times.
#include <gtest/gtest.h>

#include "engine/loop.h"
#include "tests/core/hand_profiles.h"

namespace gradcast {
namespace {

constexpr int64_t kSecondNs = 1'000'000'000;

FollowedPlan two_blocks() {
  const Profile profile = profile_of(0, 0, {{4'000'000}, {6'000'000}, {2'400'000}});
  return {profile, plan_of({block_of({{4'000'000, 12'400'000}}), block_of({{0, 4'000'000}})})};
}

TEST(Describe, NamesABlockByItsTensorsItsSizeAndItsHalf) {
  EXPECT_EQ(block_text(two_blocks(), 0), "block 1 of 2 (t1 … t2, 8.4 MB)");
  EXPECT_EQ(block_text(two_blocks(), 1), "block 2 of 2 (t0, 4.0 MB)");
  const FollowedPlan halves(profile_of(0, 0, {{500}}),
                            plan_of({block_of({{0, 500}}, Op::kReduceScatter), block_of({{0, 500}}, Op::kAllGather)}));
  EXPECT_EQ(block_text(halves, 0), "block 1 of 2 (reduce-scatter of t0, 500 B)");
  EXPECT_EQ(block_text(halves, 1), "block 2 of 2 (all-gather of t0, 500 B)");
}

TEST(Describe, AnIterationWaitsForGradientsOrForTheOldestBlockOnTheNetworkOrForNothing) {
  IterationRecord record;
  record.ready_ns.assign(3, 0);
  record.blocks.resize(2);
  const auto waiting = [&](int64_t now_ns) { return waiting_text(two_blocks(), record, now_ns); };
  EXPECT_EQ(waiting(0), "block 1 of 2 (t1 … t2, 8.4 MB) waits for the gradients of t1 and 1 more");
  record.ready_ns[1] = 5;
  EXPECT_EQ(waiting(0), "block 1 of 2 (t1 … t2, 8.4 MB) waits for the gradient of t2");
  record.ready_ns[2] = 6;
  EXPECT_EQ(waiting(0), "block 1 of 2 (t1 … t2, 8.4 MB) is about to start");
  record.blocks[0].launch_ns = 7;
  record.blocks[1].launch_ns = 8 * kSecondNs;
  EXPECT_EQ(waiting(7 + 31 * kSecondNs + kSecondNs / 5),
            "block 1 of 2 (t1 … t2, 8.4 MB) is on the network since 31.2 s");
  record.blocks[0].finish_ns = 9 * kSecondNs;
  EXPECT_EQ(waiting(10 * kSecondNs), "block 2 of 2 (t0, 4.0 MB) is on the network since 2.0 s");
  record.blocks[1].finish_ns = 11 * kSecondNs;
  EXPECT_EQ(waiting(12 * kSecondNs), "");
}

}  // namespace
}  // namespace gradcast
