// One engine on a network that a test completes by hand: what each function promises.
#include "gradcast/engine.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "gradcast/error.h"
#include "tests/engine/asleep.h"
#include "tests/engine/hand_engine.h"
#include "tests/support/refusals.h"

namespace gradcast {
namespace {

using Manner = HandTransport::Manner;

// In which at least one of the blocks is due and not finished.
int64_t together_ns(std::vector<BlockRecord> blocks) {
  std::ranges::sort(blocks, {}, &BlockRecord::due_ns);
  int64_t total_ns = 0;
  int64_t covered_until_ns = 0;
  for (const BlockRecord& block : blocks) {
    total_ns += std::max<int64_t>(0, block.finish_ns - std::max(block.due_ns, covered_until_ns));
    covered_until_ns = std::max(covered_until_ns, block.finish_ns);
  }
  return total_ns;
}

TEST(Engine, StartsBlocksInPlanOrderAndSaysWhatHasArrived) {
  HandEngine hand(3);
  Engine& engine = hand.engine;
  EXPECT_EQ(engine.begin(), 0);
  EXPECT_TRUE(engine.busy());
  engine.on_ready(0);
  engine.on_ready(1);
  EXPECT_FALSE(engine.wait(Tensors{0}, 1'000'000));
  EXPECT_TRUE(hand.transport.started().empty()) << "the block of tensor 2 goes first";
  EXPECT_EQ(engine.waiting_for(), "block 1 of 3 (t2, 40 B) waits for the gradient of t2");
  engine.on_ready(2);
  ASSERT_TRUE(hand.transport.await_started(1));
  EXPECT_FALSE(engine.wait(Tensors{2}, 0));
  hand.transport.complete(0);
  EXPECT_TRUE(engine.wait(Tensors{2}, kPatienceNs));
  EXPECT_FALSE(engine.wait(Tensors{2, 1}, 0));
  EXPECT_EQ(engine.arrivals(0), Tensors({2}));
  ASSERT_TRUE(hand.transport.finish(1));
  ASSERT_TRUE(hand.transport.finish(2));
  EXPECT_TRUE(engine.wait_all(kPatienceNs));
  EXPECT_TRUE(engine.wait_all(-1));
  EXPECT_EQ(engine.arrivals(0), Tensors({2, 1, 0}));
  EXPECT_EQ(engine.arrivals(2), Tensors({0}));
  EXPECT_TRUE(engine.arrivals(3).empty());
  EXPECT_TRUE(engine.arrivals(300).empty());
  EXPECT_FALSE(engine.busy());
  EXPECT_EQ(engine.waiting_for(), "");
  EXPECT_EQ(hand.transport.started(), std::vector<int64_t>({0, 1, 2}));
}

TEST(Engine, ABlockThatADeviceHasNotWrittenIsDueOnceItHas) {
  HandEngine hand(3, 2);
  hand.begin_with_all();
  ASSERT_TRUE(hand.transport.await_started(2));
  // The network is idle before each of them, though both have been handed over.
  const int64_t first_ns = Engine::now_ns();
  hand.transport.began(0);
  hand.transport.complete(0);
  ASSERT_TRUE(hand.engine.wait(Tensors{2}, kPatienceNs));
  const int64_t second_ns = Engine::now_ns();
  hand.transport.began(1);
  hand.transport.complete(1);
  ASSERT_TRUE(hand.transport.finish(2));
  ASSERT_TRUE(hand.engine.wait_all(kPatienceNs));
  for (const int64_t ticket : {2, 1, 0, -1, 7}) {
    hand.transport.began(ticket);  // too late, or never started
  }
  hand.engine.shutdown();
  const std::vector<BlockRecord> blocks = hand.engine.timeline().back().blocks;
  EXPECT_GE(blocks[0].ready_ns, first_ns);
  EXPECT_LE(blocks[0].finish_ns, second_ns);
  EXPECT_GE(blocks[1].ready_ns, second_ns);
  for (const BlockRecord& block : {blocks[0], blocks[1]}) {
    EXPECT_EQ(block.due_ns, block.ready_ns);
    EXPECT_EQ(block.launch_ns, block.ready_ns);
  }
  EXPECT_LT(blocks[2].ready_ns, first_ns) << "its gradient was there when the block could be sent";
  EXPECT_EQ(hand.engine.counters().link_ns, together_ns(blocks));
}

TEST(Engine, WrongUseIsRefused) {
  const Profile profile = float_tensors(2);
  HandTransport transport;
  Engine engine(transport, {});
  const auto refused = [](const auto& action, const std::string& text) {
    expect_refused(action, ErrorCode::kInvalidUse, text);
  };
  refused([&] { engine.begin(); }, "call follow first");
  refused([&] { engine.wait_all(0); }, "call begin first");
  refused([&] { engine.arrivals(0); }, "call begin first");
  EXPECT_FALSE(engine.busy());
  EXPECT_EQ(engine.waiting_for(), "");

  EXPECT_EQ(engine.follow(profile, block_per_tensor(profile)), 1);
  refused([&] { engine.on_ready(0); }, "call begin first");
  engine.begin();
  for (const int32_t tensor : {-1, 2}) {
    refused([&] { engine.on_ready(tensor); },
            "tensor " + std::to_string(tensor) + " does not exist; the profile has 2");
    refused([&] { engine.wait(Tensors{tensor}, 0); }, "does not exist");
  }
  refused([&] { engine.arrivals(-1); }, "position -1");
  engine.on_ready(0);
  refused([&] { engine.on_ready(0); }, "the gradient of t0 was given twice in iteration 0");
  refused([&] { engine.begin(); }, "blocks of iteration 0 are not finished");
  refused([&] { engine.follow(profile, block_per_tensor(profile)); }, "blocks of iteration 0 are not finished");
}

TEST(Engine, PlansAreCheckedAndCountedAndTakeEffectAtTheNextIteration) {
  HandEngine hand(2, 1, Manner::kAtOnce);
  Engine& engine = hand.engine;
  Plan incomplete = block_per_tensor(hand.profile);
  incomplete.blocks.pop_back();
  expect_refused([&] { engine.follow(hand.profile, incomplete); }, ErrorCode::kInvalidPlan, "is in no block");
  expect_refused([&] { engine.follow(Profile{}, Plan{}); }, ErrorCode::kInvalidProfile, "tensors is empty");
  hand.begin_with_all();
  ASSERT_TRUE(engine.wait_all(kPatienceNs));
  const Profile larger = float_tensors(3);
  EXPECT_EQ(engine.follow(larger, block_per_tensor(larger)), 2);
  // The iteration that has ended is still that of the old plan.
  EXPECT_EQ(engine.arrivals(0).size(), 2U);
  EXPECT_EQ(engine.begin(), 1);
  for (const int32_t tensor : {0, 1, 2}) {
    engine.on_ready(tensor);
  }
  EXPECT_TRUE(engine.wait_all(kPatienceNs));
  const std::vector<IterationRecord> timeline = engine.timeline();
  ASSERT_EQ(timeline.size(), 2U);
  EXPECT_EQ(timeline[0].plan_version, 1);
  EXPECT_EQ(timeline[1].plan_version, 2);
  EXPECT_EQ(timeline[1].blocks.size(), 3U);
  EXPECT_EQ(hand.transport.started(), std::vector<int64_t>({0, 1, 2, 3, 4})) << "tickets ascend over iterations";
}

TEST(Engine, OptionsOutOfRangeAreRefused) {
  HandTransport transport;
  expect_refused([&] { Engine(transport, {"", 16}); }, ErrorCode::kInvalidOption, "thread_name is empty");
  expect_refused([&] { Engine(transport, {"gradcast", 0}); }, ErrorCode::kInvalidOption, "timeline_iterations is 0");
  expect_refused([&] { Engine(transport, {"gradcast", 1 << 30}); }, ErrorCode::kInvalidOption, "timeline_iterations");
}

TEST(Engine, ItsThreadIsNamedAndALongNameIsCut) {
  for (const std::string name : {"gradcast", "a name of more than fifteen characters"}) {
    HandTransport transport;
    Engine engine(transport, {name, 1});
    engine.shutdown();
    EXPECT_EQ(transport.thread_name(), name.substr(0, 15));
    EXPECT_TRUE(transport.closed());
  }
}

TEST(Engine, ABlockIsDueWhenItIsReadyAndTheOneBeforeItIsOutOfItsWay) {
  for (const int32_t in_flight : {1, 2}) {
    HandEngine hand(3, in_flight);
    const int64_t begin_ns = Engine::now_ns();
    hand.engine.begin();
    hand.engine.on_ready(2);
    hand.engine.on_ready(1);
    ASSERT_TRUE(hand.transport.await_started(static_cast<size_t>(in_flight)));
    ASSERT_TRUE(hand.transport.finish(0));
    ASSERT_TRUE(hand.transport.finish(1));
    ASSERT_TRUE(hand.engine.wait(Tensors{1}, kPatienceNs));
    hand.engine.on_ready(0);
    ASSERT_TRUE(hand.transport.finish(2));
    ASSERT_TRUE(hand.engine.wait_all(kPatienceNs));
    const IterationRecord record = hand.engine.timeline().back();
    const std::vector<BlockRecord>& blocks = record.blocks;
    EXPECT_GE(blocks[0].ready_ns, begin_ns);
    for (size_t block = 0; block < 3; ++block) {
      EXPECT_EQ(blocks[block].ready_ns, record.ready_ns[2 - block]);
      EXPECT_GE(blocks[block].finish_ns, blocks[block].launch_ns);
    }
    EXPECT_EQ(blocks[0].due_ns, blocks[0].ready_ns);
    EXPECT_EQ(blocks[1].due_ns,
              std::max(blocks[1].ready_ns, in_flight == 1 ? blocks[0].finish_ns : blocks[0].launch_ns));
    EXPECT_EQ(blocks[2].due_ns, blocks[2].ready_ns) << "nothing was in its way";
    EXPECT_EQ(hand.engine.counters().link_ns, together_ns(blocks));
  }
}

TEST(Engine, AGatherIsReadyWhenItsScatterHasFinished) {
  const Profile profile = float_tensors(1);
  Plan plan = block_per_tensor(profile);
  plan.blocks.push_back(plan.blocks.front());
  plan.blocks[0].op = Op::kReduceScatter;
  plan.blocks[1].op = Op::kAllGather;
  HandTransport transport(Manner::kAtOnce);
  Engine engine(transport, {});
  engine.follow(profile, plan);
  engine.begin();
  engine.on_ready(0);
  ASSERT_TRUE(engine.wait_all(kPatienceNs));
  const IterationRecord record = engine.timeline().front();
  EXPECT_EQ(record.blocks[1].ready_ns, record.blocks[0].finish_ns);
  EXPECT_GE(record.blocks[1].launch_ns, record.blocks[0].finish_ns);
}

TEST(Engine, CountsAndKeepsABoundedTimeline) {
  for (const int32_t in_flight : {1, 3}) {
    HandEngine hand(4, in_flight, Manner::kAtOnce, {"gradcast", 3});
    int64_t record_bytes = 0;
    int64_t covered_ns = 0;
    for (int64_t iteration = 0; iteration < 20; ++iteration) {
      EXPECT_EQ(hand.begin_with_all(), iteration);
      ASSERT_TRUE(hand.engine.wait_all(kPatienceNs));
      covered_ns += together_ns(hand.engine.timeline().back().blocks);
      const EngineCounters counters = hand.engine.counters();
      EXPECT_EQ(counters.iterations, iteration + 1);
      EXPECT_EQ(counters.blocks, 4 * (iteration + 1));
      EXPECT_EQ(counters.bytes, 160 * (iteration + 1));
      EXPECT_EQ(counters.link_ns, covered_ns);
      record_bytes = iteration == 2 ? counters.record_bytes : record_bytes;
      EXPECT_TRUE(iteration < 3 || counters.record_bytes == record_bytes);
    }
    EXPECT_GE(record_bytes, 3 * (4 * 8 + 4 * 32));
    EXPECT_EQ(hand.engine.timeline().front().iteration, 17);
    EXPECT_EQ(hand.engine.timeline().size(), 3U);
    EXPECT_GT(hand.engine.counters().loop_ns, 0);
  }
}

TEST(Engine, WaitersOfAnIterationAreServedAlsoWhenTheNextHasBegun) {
  HandEngine hand(1, 1, Manner::kAtOnce);
  for (int round = 0; round < 50; ++round) {
    hand.engine.begin();
    // Some of these wake only when the next iteration, in which nothing has arrived, is open.
    std::array<std::atomic<pid_t>, 8> ids = {};
    std::vector<std::thread> waiters;
    for (std::atomic<pid_t>& id : ids) {
      waiters.emplace_back([&] {
        id = gettid();
        EXPECT_TRUE(hand.engine.wait(Tensors{0}, kPatienceNs));
      });
    }
    // One that calls wait() only then would wait for the next iteration, and rightly so.
    for (const std::atomic<pid_t>& id : ids) {
      while (!is_asleep(id)) {
        std::this_thread::yield();
      }
    }
    hand.engine.on_ready(0);
    ASSERT_TRUE(hand.engine.wait_all(kPatienceNs));
    hand.engine.begin();
    for (std::thread& waiter : waiters) {
      waiter.join();
    }
    hand.engine.on_ready(0);
    ASSERT_TRUE(hand.engine.wait_all(kPatienceNs));
  }
}

}  // namespace
}  // namespace gradcast
