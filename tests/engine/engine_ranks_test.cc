// Engines of several ranks on the in-process network: sums are right whatever the threads do.
#include "tests/engine/engine_ranks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/seeds.h"

namespace gradcast {
namespace {

// One rank's part of an iteration: gradients from several threads in a random order, and reads as they arrive.
void run_iteration(EngineRanks& ranks, Random& random, int32_t rank, int64_t iteration) {
  Engine& engine = ranks.engine(rank);
  ASSERT_EQ(engine.begin(), iteration);
  const std::vector<int32_t> order = random_order(random, ranks.tensor_count());
  const size_t thread_count = static_cast<size_t>(random.integer(1, 3));
  std::vector<std::thread> backward;
  for (size_t thread = 0; thread < thread_count; ++thread) {
    backward.emplace_back([&, thread] {
      for (size_t i = thread; i < order.size(); i += thread_count) {
        ranks.give(rank, order[i], iteration);
      }
    });
  }
  for (const int32_t tensor : random_order(random, ranks.tensor_count())) {
    EXPECT_TRUE(engine.wait(std::vector{tensor}, kPatienceNs)) << engine.waiting_for();
    ranks.expect_sum(rank, tensor, iteration);
  }
  for (std::thread& thread : backward) {
    thread.join();
  }
  EXPECT_TRUE(engine.wait_all(kPatienceNs)) << engine.waiting_for();
  EXPECT_FALSE(engine.busy());
  std::vector<int32_t> arrivals = engine.arrivals(0);
  std::ranges::sort(arrivals);
  EXPECT_EQ(arrivals.size(), static_cast<size_t>(ranks.tensor_count()));
  EXPECT_TRUE(std::ranges::adjacent_find(arrivals) == arrivals.end()) << "a tensor arrived twice";
}

void expect_plan_order(const IterationRecord& record, int32_t in_flight) {
  for (size_t block = 0; block < record.blocks.size(); ++block) {
    const BlockRecord& times = record.blocks[block];
    EXPECT_GE(times.launch_ns, times.ready_ns);
    EXPECT_GE(times.finish_ns, times.launch_ns);
    if (block > 0) {
      EXPECT_GE(times.launch_ns, record.blocks[block - 1].launch_ns) << "block " << block;
    }
    // At its launch fewer than in_flight earlier blocks were unfinished.
    int64_t unfinished = 0;
    for (size_t earlier = 0; earlier < block; ++earlier) {
      unfinished += record.blocks[earlier].finish_ns > times.launch_ns ? 1 : 0;
    }
    EXPECT_LT(unfinished, in_flight) << "block " << block;
  }
}

void run_random_ranks(uint64_t seed) {
  Random random(seed);
  const Profile profile = random_tensors(random);
  const Plan plan = random_followable(random, profile, random.chance(0.5));
  const InprocCost cost = random.chance(0.5) ? InprocCost{} : InprocCost{2e4, 20};
  EngineRanks ranks(static_cast<int32_t>(random.integer(1, 4)), profile, cost);
  for (int i = 0; i < 4; ++i) {
    ranks.world.delay(static_cast<int32_t>(random.integer(0, ranks.world_size() - 1)), random.integer(0, 20),
                      random.integer(0, 3'000'000));
  }
  ranks.on_every_rank([&](int32_t rank) {
    Random own(seed * 1000 + static_cast<uint64_t>(rank));
    ranks.engine(rank).follow(profile, plan);
    for (int64_t iteration = 0; iteration < 6; ++iteration) {
      run_iteration(ranks, own, rank, iteration);
    }
    for (const IterationRecord& record : ranks.engine(rank).timeline()) {
      expect_plan_order(record, plan.in_flight);
    }
  });
}

TEST(EngineRanks, SumsAreRightForRandomPlansOrdersThreadsAndDelays) {
  for (uint64_t seed = 1; seed <= seed_count(40); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    run_random_ranks(seed);
    if (testing::Test::HasFailure()) {
      return;
    }
  }
}

TEST(EngineRanks, ANewPlanBetweenIterationsIsFollowedByAll) {
  const Profile profile = float_tensors(4);
  EngineRanks ranks(2, profile);
  ranks.on_every_rank([&](int32_t rank) {
    for (int64_t iteration = 0; iteration < 12; ++iteration) {
      Plan plan = block_per_tensor(profile, 1 + static_cast<int32_t>(iteration % 3));
      if (iteration % 2 == 1) {
        plan.blocks = {plan.blocks.front()};
        plan.blocks.front().ranges = {{0, 160}};
      }
      EXPECT_EQ(ranks.engine(rank).follow(profile, plan), iteration + 1);
      ranks.engine(rank).begin();
      ranks.give_all(rank, iteration);
      ASSERT_TRUE(ranks.engine(rank).wait_all(kPatienceNs));
      ranks.expect_all_sums(rank, iteration);
      EXPECT_EQ(ranks.engine(rank).timeline().back().plan_version, iteration + 1);
    }
  });
}

}  // namespace
}  // namespace gradcast
