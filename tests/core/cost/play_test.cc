// play(): each sentence of its definition, on numbers worked out by hand. play_random_test.cc has what they do together.
#include "gradcast/play.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/core/hand_profiles.h"
#include "tests/support/refusals.h"

namespace gradcast {
namespace {

// Three tensors that backward reaches in the reverse of forward's order; offsets 0, 4, 10.
Profile three_tensors() {
  return profile_of(10, 8, {{4, 10, 0}, {6, 4, 3}, {2, 0, 5}});
}

Plan one_block_per_tensor(Mode mode) {
  return plan_of({block_of({{10, 12}}), block_of({{4, 10}}), block_of({{0, 4}})}, mode);
}

void expect_blocks(const Timeline& timeline, const std::vector<BlockTimes>& expected) {
  ASSERT_EQ(timeline.blocks.size(), expected.size());
  for (size_t k = 0; k < expected.size(); ++k) {
    SCOPED_TRACE("block " + std::to_string(k));
    EXPECT_DOUBLE_EQ(timeline.blocks[k].ready_ns, expected[k].ready_ns);
    EXPECT_DOUBLE_EQ(timeline.blocks[k].launch_ns, expected[k].launch_ns);
    EXPECT_DOUBLE_EQ(timeline.blocks[k].finish_ns, expected[k].finish_ns);
  }
}

void expect_tensors(const Timeline& timeline, const std::vector<TensorTimes>& expected) {
  ASSERT_EQ(timeline.tensors.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    SCOPED_TRACE("tensor " + std::to_string(i));
    EXPECT_DOUBLE_EQ(timeline.tensors[i].arrival_ns, expected[i].arrival_ns);
    EXPECT_DOUBLE_EQ(timeline.tensors[i].read_ns, expected[i].read_ns);
    EXPECT_DOUBLE_EQ(timeline.tensors[i].wait_ns, expected[i].wait_ns);
  }
}

TEST(Play, OneServerInBothModes) {
  for (const Mode mode : {Mode::kOverlap, Mode::kHook}) {
    const Timeline timeline = play(three_tensors(), link_of(2, 1), one_block_per_tensor(mode));
    expect_blocks(timeline, {{0, 0, 4}, {4, 4, 12}, {10, 12, 18}});
    if (mode == Mode::kOverlap) {
      expect_tensors(timeline, {{18, 10, 8}, {12, 21, 0}, {4, 23, 0}});
    } else {  // forward waits for all of them and for nothing afterwards
      expect_tensors(timeline, {{18, 18, 0}, {12, 21, 0}, {4, 23, 0}});
    }
    EXPECT_DOUBLE_EQ(timeline.forward_start_ns, mode == Mode::kOverlap ? 10 : 18);
    EXPECT_DOUBLE_EQ(timeline.iteration_ns, 26);
    EXPECT_DOUBLE_EQ(timeline.exposed_ns, 8);
  }
}

TEST(Play, WaitsAddUp) {
  // Ready together; arrivals 3, 7, 11. Reads: 0 waits 3; 1 at 4 waits 3; 2 at 8 waits 3; then 1 more.
  const Profile profile = profile_of(0, 3, {{2, 0, 0}, {3, 0, 1}, {3, 0, 2}});
  const Timeline timeline =
      play(profile, link_of(1, 1), plan_of({block_of({{0, 2}}), block_of({{2, 5}}), block_of({{5, 8}})}));
  expect_tensors(timeline, {{3, 0, 3}, {7, 4, 3}, {11, 8, 3}});
  EXPECT_DOUBLE_EQ(timeline.iteration_ns, 12);
  EXPECT_DOUBLE_EQ(timeline.exposed_ns, 9);
}

TEST(Play, EachFurtherPartOfTheUpdateTakesTimeWhereForwardRuns) {
  // As in WaitsAddUp, with parts of 2: at 3 without, at 7 (read at 4), and at 11 (read at 10) with them.
  Profile profile = profile_of(0, 3, {{2, 0, 0}, {3, 0, 1}, {3, 0, 2}});
  profile.part_ns = 2;
  const Plan plan = plan_of({block_of({{0, 2}}), block_of({{2, 5}}), block_of({{5, 8}})});
  const Timeline timeline = play(profile, link_of(1, 1), plan);
  expect_tensors(timeline, {{3, 0, 3}, {7, 4, 3}, {11, 10, 1}});
  EXPECT_EQ(timeline.parts, 3);
  EXPECT_DOUBLE_EQ(timeline.iteration_ns, 14);
  EXPECT_DOUBLE_EQ(timeline.exposed_ns, 11);
  EXPECT_DOUBLE_EQ(timeline.host_ns, 0);
  // A part updates all that has arrived by then, and all that is read together.
  profile = profile_of(0, 9, {{2, 0, 0}, {3, 0, 0}, {3, 0, 8}});
  profile.part_ns = 2;
  const std::vector<Block> blocks = {block_of({{5, 8}}), block_of({{0, 2}}), block_of({{2, 5}})};
  EXPECT_EQ(play(profile, link_of(1, 1), plan_of(blocks)).parts, 1);
  EXPECT_EQ(play(profile, link_of(1, 1), plan).parts, 2);
  EXPECT_EQ(play(profile, link_of(1, 1), plan_of(blocks, Mode::kHook)).parts, 1);
  EXPECT_DOUBLE_EQ(play(profile, link_of(1, 1), plan_of(blocks, Mode::kHook)).iteration_ns, 20);
}

TEST(Play, TheSlowerOfHostAndDeviceDecides) {
  Profile profile = profile_of(0, 3, {{2, 0, 0}, {3, 0, 1}, {3, 0, 2}});
  const Plan plan = plan_of({block_of({{0, 2}}), block_of({{2, 5}}), block_of({{5, 8}})});
  for (const double host_step_ns : {1, 3}) {
    profile.host_step_ns = host_step_ns;
    profile.host_block_ns = 0.5;
    profile.host_part_ns = 1;
    const Timeline timeline = play(profile, link_of(1, 1), plan);
    EXPECT_DOUBLE_EQ(timeline.host_ns, host_step_ns + 2 * 1 + 3 * 0.5);
    EXPECT_DOUBLE_EQ(timeline.iteration_ns, 12) << "the device";
  }
  profile.host_step_ns = 11;
  EXPECT_DOUBLE_EQ(play(profile, link_of(1, 1), plan).iteration_ns, 11 + 2 + 1.5);
  EXPECT_DOUBLE_EQ(play(profile, link_of(1, 1), plan).exposed_ns, 9) << "what communication costs the device";
  EXPECT_DOUBLE_EQ(play(profile, link_of(1, 1), plan_of(plan.blocks, Mode::kHook)).host_ns, 11 + 1.5);
  // Where it comes to forward late, all has arrived: the host that is the slower one makes one part.
  profile.host_block_ns = 5;
  EXPECT_DOUBLE_EQ(play(profile, link_of(1, 1), plan).iteration_ns, 11 + 15);
}

TEST(Play, InFlightLimitsUnfinishedBlocks) {
  const Profile profile = profile_of(0, 0, {{1, 0, 0}, {1, 0, 0}, {1, 0, 0}, {1, 0, 0}});
  const std::vector<Block> blocks = {block_of({{0, 1}}), block_of({{1, 2}}), block_of({{2, 3}}), block_of({{3, 4}})};
  const auto times = [&](int32_t in_flight) {
    return play(profile, link_of(5, 1), plan_of(blocks, Mode::kOverlap, in_flight));
  };
  expect_blocks(times(1), {{0, 0, 6}, {0, 6, 12}, {0, 12, 18}, {0, 18, 24}});
  expect_blocks(times(2), {{0, 0, 6}, {0, 0, 7}, {0, 6, 12}, {0, 7, 13}});
  expect_blocks(times(3), {{0, 0, 6}, {0, 0, 7}, {0, 0, 8}, {0, 6, 12}});
  expect_blocks(times(4), {{0, 0, 6}, {0, 0, 7}, {0, 0, 8}, {0, 0, 9}});
  expect_blocks(times(1000), {{0, 0, 6}, {0, 0, 7}, {0, 0, 8}, {0, 0, 9}});
}

TEST(Play, ABlockWaitsForEveryTensorThatItTouches) {
  // Offsets 0, 4, 10, 12. One byte of a tensor is enough; a range that ends where a tensor begins does not touch it.
  const Profile profile = three_tensors();
  const auto ready_ns = [&](const std::vector<Block>& blocks) {
    return play(profile, link_of(1, 1), plan_of(blocks)).blocks[0].ready_ns;
  };
  EXPECT_EQ(ready_ns({block_of({{4, 12}}), block_of({{0, 4}})}), 4);
  EXPECT_EQ(ready_ns({block_of({{3, 12}}), block_of({{0, 3}})}), 10);
  EXPECT_EQ(ready_ns({block_of({{9, 10}}), block_of({{0, 9}, {10, 12}})}), 4);
  EXPECT_EQ(ready_ns({block_of({{9, 11}}), block_of({{0, 9}, {11, 12}})}), 4);
  EXPECT_EQ(ready_ns({block_of({{10, 11}}), block_of({{0, 10}, {11, 12}})}), 0);
  EXPECT_EQ(ready_ns({block_of({{0, 1}, {11, 12}}), block_of({{1, 11}})}), 10);
}

TEST(Play, UpdatesRunWhereForwardRuns) {
  // Arrivals 2 and 5, updates 3 and 4, compute 1 before the second read and 1 behind it.
  const Profile profile = profile_of(0, 2, {{1, 0, 0, 3}, {2, 0, 1, 4}});
  const std::vector<Block> blocks = {block_of({{0, 1}}), block_of({{1, 3}})};
  const Timeline overlap = play(profile, link_of(1, 1), plan_of(blocks));
  expect_tensors(overlap, {{2, 0, 2}, {5, 6, 0}});  // 2 + update 3 + compute 1: the second is there
  EXPECT_DOUBLE_EQ(overlap.iteration_ns, 6 + 4 + 1);
  EXPECT_DOUBLE_EQ(overlap.exposed_ns, 2);
  const Timeline hook = play(profile, link_of(1, 1), plan_of(blocks, Mode::kHook));
  EXPECT_DOUBLE_EQ(hook.forward_start_ns, 5 + 7);
  expect_tensors(hook, {{2, 12, 0}, {5, 13, 0}});
  EXPECT_DOUBLE_EQ(hook.iteration_ns, 5 + 7 + 2);
  EXPECT_DOUBLE_EQ(hook.exposed_ns, 5);
}

LinkModel link_of_three() {
  LinkModel link = link_of(100, 100);
  link.reduce_scatter = linear_cost({3, 1});
  link.all_gather = linear_cost({1, 0.5});
  return link;
}

TEST(Play, AGatherWaitsForTheScattersThatShareItsBytes) {
  const Profile profile = profile_of(0, 0, {{4, 0, 0}, {4, 0, 0}});
  const auto times = [&](Range gathered, const std::vector<Range>& rest) {
    std::vector<Block> blocks = {block_of({{0, 4}}, Op::kReduceScatter), block_of({{4, 8}}, Op::kReduceScatter),
                                 block_of({gathered}, Op::kAllGather)};
    for (const Range& range : rest) {
      blocks.push_back(block_of({range}, Op::kAllGather));
    }
    LinkModel link = link_of_three();
    link.all_gather = linear_cost({6, 0.5});
    return play(profile, link, plan_of(blocks, Mode::kHook, 3));
  };
  // Scatters: both launched at 0, bytes from 3 to 7 and from 7 to 11. The gather of the first is launched at 7.
  expect_blocks(times({0, 4}, {{4, 8}}), {{0, 0, 7}, {0, 0, 11}, {7, 7, 15}, {11, 11, 19}});
  // One shared byte is enough to wait for the second.
  expect_blocks(times({0, 5}, {{5, 8}}), {{0, 0, 7}, {0, 0, 11}, {11, 11, 19.5}, {11, 11, 21}});
}

TEST(Play, AKindThatTheLinkLacksIsRefused) {
  const Profile profile = profile_of(0, 0, {{2, 0, 0}});
  const Plan plan = plan_of({block_of({{0, 2}}, Op::kReduceScatter), block_of({{0, 2}}, Op::kAllGather)});
  LinkModel link = link_of(1, 1);
  link.reduce_scatter = link.all_reduce;
  expect_refused([&] { play(profile, link, plan); }, ErrorCode::kInvalidLink, "all_gather");
}

}  // namespace
}  // namespace gradcast
