// The checker and the hash: every way in which a plan can miss, repeat or cut bytes is refused, and two plans share a
// hash exactly when they send the same bytes of the same tensors in the same operations and order.
#include "gradcast/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests/core/hand_profiles.h"
#include "tests/core/profiles.h"
#include "tests/core/random_plans.h"
#include "tests/support/refusals.h"

namespace gradcast {
namespace {

constexpr Op kScatter = Op::kReduceScatter;
constexpr Op kGather = Op::kAllGather;

// Buffer 0: 16 bytes in elements of 4, tensors of 8 each. Buffer 1: 4 bytes in elements of 2.
Profile two_buffers() {
  Profile profile = profile_of(10, 10, {{8, 5, 0}, {4, 4, 1, 0, 1}, {8, 3, 2}});
  profile.tensors[0].element_bytes = profile.tensors[2].element_bytes = 4;
  profile.tensors[1].element_bytes = 2;
  return profile;
}

const Block kBuffer1 = block_of({{0, 4}}, Op::kAllReduce, 1);

Block one(int64_t lo_bytes, int64_t hi_bytes, Op op = Op::kAllReduce, int32_t buffer = 0) {
  return block_of({{lo_bytes, hi_bytes}}, op, buffer);
}

TEST(CheckPlan, AcceptsEveryWayToCarryEachByteOnce) {
  const std::vector<std::vector<Block>> plans = {
      {one(0, 16), kBuffer1},
      {kBuffer1, one(8, 16), one(0, 8)},
      {one(0, 16), one(0, 2, Op::kAllReduce, 1), one(2, 4, Op::kAllReduce, 1)},
      {block_of({{0, 4}, {12, 16}}), one(4, 12), kBuffer1},
      {one(0, 16, kScatter), kBuffer1, one(0, 16, kGather)},
      // One gather of two scatters, two gathers of one scatter, cut elsewhere; the rest all-reduced.
      {one(0, 4, kScatter), one(4, 8, kScatter), one(0, 8, kGather), kBuffer1, one(8, 16)},
      {one(0, 8, kScatter), one(4, 8, kGather), one(0, 4, kGather), kBuffer1, one(8, 16)},
      {one(0, 8, kScatter), one(0, 4, kGather), one(8, 16, kScatter), one(4, 16, kGather), kBuffer1},
  };
  for (const std::vector<Block>& blocks : plans) {
    EXPECT_NO_THROW(check_plan(plan_of(blocks), two_buffers()));
  }
}

struct Fault {
  std::vector<Block> blocks;  // of buffer 0, whose bytes are at fault; buffer 1 is carried after them
  const char* text;
};

TEST(CheckPlan, RefusesEveryFaultByItsPlace) {
  const std::vector<Fault> faults = {
      // Missing bytes.
      {{}, "byte 0 of buffer 0"},
      {{one(4, 16)}, "byte 0 of buffer 0"},
      {{one(0, 12)}, "byte 12 of buffer 0"},
      {{block_of({{0, 4}, {8, 16}})}, "byte 4 of buffer 0"},
      {{one(8, 16), one(0, 4)}, "byte 4 of buffer 0"},
      // Repeated bytes; the last has as many bytes as the buffer, one of them twice and one never.
      {{one(0, 16), one(4, 8)}, "byte 4 of buffer 0"},
      {{one(0, 12), one(8, 16)}, "byte 8 of buffer 0"},
      {{one(0, 16), one(0, 16)}, "in blocks[0] and blocks[1]"},
      {{one(0, 8), one(4, 12)}, "buffer 0"},
      // Ranges that are not in order: overlapping, adjacent, descending.
      {{block_of({{0, 8}, {4, 16}})}, "blocks[0].ranges[1]"},
      {{block_of({{0, 8}, {8, 16}})}, "blocks[0].ranges[1]"},
      {{block_of({{12, 16}, {0, 4}}), one(4, 12)}, "blocks[0].ranges[1]"},
      // Ranges that are none.
      {{one(0, 16), one(4, 4)}, "blocks[1].ranges[0]"},
      {{one(0, 16), one(8, 4)}, "blocks[1].ranges[0]"},
      {{one(-4, 16)}, "blocks[0].ranges[0]"},
      {{one(0, 20)}, "blocks[0].ranges[0]"},
      {{one(0, 16), block_of({})}, "blocks[1]"},
      // Cut elements.
      {{one(0, 6), one(6, 16)}, "blocks[0].ranges[0]"},
      {{block_of({{0, 4}, {6, 16}}), one(4, 6)}, "blocks[0].ranges[1]"},
      {{one(0, 16), one(0, 1, Op::kAllReduce, 1)}, "blocks[1]"},
      // Buffers that the profile lacks.
      {{one(0, 16), one(0, 4, Op::kAllReduce, 2)}, "blocks[1].buffer"},
      {{one(0, 16), one(0, 4, Op::kAllReduce, -1)}, "blocks[1].buffer"},
      {{one(0, 16), one(0, 4, Op::kAllReduce, 1'000'000'000)}, "blocks[1].buffer"},
      // Scatters that are never gathered, in part or at all.
      {{one(0, 16, kScatter)}, "gathered"},
      {{one(0, 16, kScatter), one(0, 8, kGather)}, "gathered"},
      // Gathers before or without the scatter, which has to be the buffer's own.
      {{one(0, 16, kGather), one(0, 16, kScatter)}, "blocks[0]"},
      {{one(0, 8, kScatter), one(0, 16, kGather), one(8, 16, kScatter)}, "blocks[1]"},
      {{one(0, 16, kGather)}, "buffer 0"},
      {{one(0, 8), one(8, 16, kScatter), one(4, 16, kGather)}, "blocks[2]"},
      {{one(0, 16), one(0, 4, kScatter, 1), one(0, 4, kGather)}, "blocks[2]"},
      // Finished twice.
      {{one(0, 16), one(0, 16, kGather)}, "blocks[1]"},
      {{one(0, 16, kScatter), one(0, 16, kGather), one(4, 8, kGather)}, "byte 4"},
      {{one(0, 16, kScatter), one(0, 16), one(0, 16, kGather)}, "twice"},
      {{one(0, 16, kScatter), one(8, 16, kScatter), one(0, 16, kGather)}, "byte 8"},
  };
  for (const Fault& fault : faults) {
    SCOPED_TRACE(fault.text);
    std::vector<Block> blocks = fault.blocks;
    const bool names_buffer_1 = std::ranges::count(blocks, 1, &Block::buffer) > 0;
    if (!names_buffer_1) {
      blocks.push_back(kBuffer1);
    }
    expect_refused([&] { check_plan(plan_of(blocks), two_buffers()); }, ErrorCode::kInvalidPlan, fault.text);
  }
  const auto refused = [](const Plan& plan, const Profile& profile, const char* text) {
    expect_refused([&] { check_plan(plan, profile); }, ErrorCode::kInvalidPlan, text);
  };
  refused(plan_of({one(0, 16)}), two_buffers(), "byte 0 of buffer 1");
  refused(plan_of({one(0, 16), kBuffer1}, Mode::kOverlap, 0), two_buffers(), "in_flight");
  Profile gap = two_buffers();
  gap.tensors[1].buffer = 2;  // nothing lies in buffer 1
  refused(plan_of({one(0, 16), kBuffer1}), gap, "blocks[1].buffer");
}

TEST(CheckPlan, NoFaultIsTooSmall) {
  // Any one of a valid plan's ranges moved, dropped or doubled by one element makes it invalid.
  RandomProfileOptions profile_options;
  profile_options.buffer_count = 3;
  for (uint64_t seed = 1; seed <= 2000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    const Profile profile = random_profile(seed, profile_options);
    RandomPlanOptions options;
    options.scatter_gather = random.chance(0.5);
    const Plan plan = random_plan(random, profile, options);
    ASSERT_NO_THROW(check_plan(plan, profile));
    Plan wrong = plan;
    const auto k = static_cast<size_t>(random.integer(0, static_cast<int64_t>(plan.blocks.size()) - 1));
    Block& block = wrong.blocks[k];
    const auto r = static_cast<size_t>(random.integer(0, static_cast<int64_t>(block.ranges.size()) - 1));
    const int64_t element_bytes = detail::buffers_of(profile)[block.buffer].element_bytes;
    const int64_t fault = random.integer(0, 6);
    if (fault < 4) {
      (fault < 2 ? block.ranges[r].lo_bytes : block.ranges[r].hi_bytes) +=
          fault % 2 == 0 ? element_bytes : -element_bytes;
    } else if (fault == 4) {
      wrong.blocks.erase(wrong.blocks.begin() + static_cast<int64_t>(k));
    } else if (fault == 5) {
      wrong.blocks.push_back(Block(block));
    } else {
      block.op = block.op == Op::kAllReduce ? kScatter : Op::kAllReduce;
    }
    EXPECT_THROW(check_plan(wrong, profile), Error);
  }
}

// Hashes.

Plan reference_plan() {
  return plan_of({block_of({{0, 4}, {12, 16}}), kBuffer1, block_of({{4, 12}})});
}

TEST(HashPlan, LeavesPredictionsOut) {
  const uint64_t hash = hash_plan(reference_plan(), two_buffers());
  Plan plan = reference_plan();
  plan.policy = "other";
  plan.predicted_ns = 1;
  plan.bound_ns = 2;
  plan.plain_bound_ns = 3;
  plan.extra_json = "{\"a\":1}";
  for (Block& block : plan.blocks) {
    block.start_ns = 4;
    block.finish_ns = 5;
    block.reason = "because";
  }
  EXPECT_EQ(hash_plan(plan, two_buffers()), hash);
  Profile profile = two_buffers();
  profile.name = "other";
  profile.world_size = 2;
  profile.link = link_of(1, 1);
  profile.backward_ns = 20;
  for (Tensor& tensor : profile.tensors) {
    tensor.ready_ns += 1;
    tensor.update_ns = 7;
  }
  EXPECT_EQ(hash_plan(reference_plan(), profile), hash);
}

TEST(HashPlan, SeesEveryDifferenceInWhatTravels) {
  const uint64_t hash = hash_plan(reference_plan(), two_buffers());
  const std::vector<std::function<void(Plan&)>> changes = {
      [](Plan& plan) { plan.blocks[2].op = kScatter; }, [](Plan& plan) { plan.blocks[2].op = kGather; },
      [](Plan& plan) { plan.blocks[1].buffer = 0; }, [](Plan& plan) { plan.blocks[0].ranges[0].hi_bytes = 8; },
      [](Plan& plan) { plan.blocks[2].ranges[0].lo_bytes = 8; },
      [](Plan& plan) { std::swap(plan.blocks[0], plan.blocks[1]); },
      [](Plan& plan) { std::swap(plan.blocks[0], plan.blocks[2]); }, [](Plan& plan) { plan.blocks.pop_back(); },
      [](Plan& plan) { plan.blocks.push_back(kBuffer1); },
      // The same ranges in the same order, split into blocks elsewhere.
      [](Plan& plan) {
        plan.blocks = {block_of({{0, 4}}), block_of({{12, 16}}), kBuffer1, block_of({{4, 12}})};
      },
      [](Plan& plan) {
        plan.blocks = {block_of({{0, 4}}), kBuffer1, block_of({{12, 16}}), block_of({{4, 12}})};
      },
      [](Plan& plan) {
        plan.blocks = {block_of({{0, 16}}), kBuffer1};
      },
      [](Plan& plan) { plan.blocks.clear(); }};
  std::vector<uint64_t> hashes = {hash};
  for (size_t i = 0; i < changes.size(); ++i) {
    Plan plan = reference_plan();
    changes[i](plan);
    hashes.push_back(hash_plan(plan, two_buffers()));
  }
  for (size_t i = 0; i < hashes.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      EXPECT_NE(hashes[i], hashes[j]) << i << " and " << j;
    }
  }
}

TEST(HashPlan, SeesWhereABlockEnds) {
  // The same numbers in the same order, were it not for the number of ranges: 2 and 3 are a range or an operation and a
  // buffer.
  const Plan plan = plan_of({block_of({{0, 1}, {2, 3}, {5, 6}}), block_of({{8, 9}})});
  const Plan other = plan_of({block_of({{0, 1}}), block_of({{5, 6}, {0, 0}, {8, 9}}, kGather, 3)});
  EXPECT_NE(hash_plan(plan, two_buffers()), hash_plan(other, two_buffers()));
}

TEST(HashPlan, SeesEveryDifferenceInTheLayout) {
  const uint64_t hash = hash_plan(reference_plan(), two_buffers());
  const std::vector<std::function<void(Profile&)>> changes = {
      [](Profile& profile) { profile.tensors[0].name = "other"; },
      [](Profile& profile) { std::swap(profile.tensors[0].name, profile.tensors[2].name); },
      [](Profile& profile) { profile.tensors[0].bytes = 4, profile.tensors[2].bytes = 12; },
      [](Profile& profile) { profile.tensors[0].element_bytes = profile.tensors[2].element_bytes = 2; },
      [](Profile& profile) { profile.tensors[2].buffer = 1; },
      // Names that run together: "t0" + "t1" and "t0t" + "1".
      [](Profile& profile) { profile.tensors[0].name = "t0t", profile.tensors[1].name = "1"; },
      [](Profile& profile) { profile.tensors.pop_back(); }};
  for (size_t i = 0; i < changes.size(); ++i) {
    Profile profile = two_buffers();
    changes[i](profile);
    EXPECT_NE(hash_plan(reference_plan(), profile), hash) << i;
  }
}

TEST(HashPlan, OnlyTheOrderInsideABufferCounts) {
  // Tensor 1 is alone in its buffer: whether it is more or less urgent than the others changes no byte on the wire.
  const uint64_t hash = hash_plan(reference_plan(), two_buffers());
  Profile profile = two_buffers();
  std::swap(profile.tensors[0], profile.tensors[1]);
  EXPECT_EQ(hash_plan(reference_plan(), profile), hash);
  std::swap(profile.tensors[1], profile.tensors[2]);
  EXPECT_NE(hash_plan(reference_plan(), profile), hash);
}

TEST(HashPlan, RandomPlansCollideOnlyWhereTheyAreEqual) {
  const Profile profile = random_profile(7, {});
  Random random(7);
  std::map<uint64_t, std::vector<Block>> seen;
  for (int32_t i = 0; i < 20'000; ++i) {
    RandomPlanOptions options;
    options.scatter_gather = true;
    options.cut_count_max = 4;
    const Plan plan = random_plan(random, profile, options);
    const auto [at, inserted] = seen.try_emplace(hash_plan(plan, profile), plan.blocks);
    EXPECT_EQ(at->second, plan.blocks);
  }
  EXPECT_GT(seen.size(), 1000U);
}

}  // namespace
}  // namespace gradcast
