// One engine on a network that a test completes by hand: what each function promises.
#include "gradcast/engine.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "gradcast/error.h"
#include "tests/engine/asleep.h"
#include "tests/engine/engine_ranks.h"
#include "tests/engine/hand_transport.h"
#include "tests/support/refusals.h"

namespace gradcast {
namespace {

using Manner = HandTransport::Manner;

// An engine that follows one block per tensor, the last tensor first.
struct Fixture {
  explicit Fixture(int32_t tensor_count, Manner manner = Manner::kByHand, int32_t in_flight = 1,
                   const EngineOptions& options = {})
      : profile(float_tensors(tensor_count)), transport(manner), engine(transport, options) {
    engine.follow(profile, block_per_tensor(profile, in_flight));
  }

  Profile profile;
  HandTransport transport;
  Engine engine;
};

// In which at least one of the blocks is due and not finished.
int64_t together_ns(std::vector<BlockRecord> blocks) {
  std::sort(blocks.begin(), blocks.end(), [](const auto& one, const auto& other) { return one.due_ns < other.due_ns; });
  int64_t total_ns = 0;
  int64_t covered_until_ns = 0;
  for (const BlockRecord& block : blocks) {
    total_ns += std::max<int64_t>(0, block.finish_ns - std::max(block.due_ns, covered_until_ns));
    covered_until_ns = std::max(covered_until_ns, block.finish_ns);
  }
  return total_ns;
}

TEST(Engine, StartsBlocksInPlanOrderAndSaysWhatHasArrived) {
  Fixture fixture(3);
  Engine& engine = fixture.engine;
  EXPECT_EQ(engine.begin(), 0);
  EXPECT_TRUE(engine.busy());
  engine.on_ready(0);
  engine.on_ready(1);
  EXPECT_FALSE(engine.wait(std::vector<int32_t>{0}, 1'000'000));
  EXPECT_TRUE(fixture.transport.started().empty()) << "the block of tensor 2 goes first";
  engine.on_ready(2);
  ASSERT_TRUE(fixture.transport.await_started(1));
  EXPECT_FALSE(engine.wait(std::vector<int32_t>{2}, 0));
  fixture.transport.complete(0);
  EXPECT_TRUE(engine.wait(std::vector<int32_t>{2}, kPatienceNs));
  EXPECT_FALSE(engine.wait(std::vector<int32_t>{2, 1}, 0));
  EXPECT_EQ(engine.arrivals(0), std::vector<int32_t>({2}));
  ASSERT_TRUE(fixture.transport.await_started(2));
  fixture.transport.complete(1);
  ASSERT_TRUE(fixture.transport.await_started(3));
  fixture.transport.complete(2);
  EXPECT_TRUE(engine.wait_all(kPatienceNs));
  EXPECT_TRUE(engine.wait_all(-1));
  EXPECT_EQ(engine.arrivals(0), std::vector<int32_t>({2, 1, 0}));
  EXPECT_EQ(engine.arrivals(2), std::vector<int32_t>({0}));
  EXPECT_TRUE(engine.arrivals(3).empty());
  EXPECT_TRUE(engine.arrivals(300).empty());
  EXPECT_FALSE(engine.busy());
  EXPECT_EQ(fixture.transport.started(), std::vector<int64_t>({0, 1, 2}));
}

TEST(Engine, ABlockThatADeviceHasNotWrittenIsDueOnceItHas) {
  Fixture fixture(3, Manner::kByHand, 2);
  fixture.engine.begin();
  for (const int32_t tensor : {2, 1, 0}) {
    fixture.engine.on_ready(tensor);
  }
  ASSERT_TRUE(fixture.transport.await_started(2));
  // The network is idle before each of them, though both have been handed over.
  const int64_t first_ns = Engine::now_ns();
  fixture.transport.began(0);
  fixture.transport.complete(0);
  ASSERT_TRUE(fixture.engine.wait(std::vector<int32_t>{2}, kPatienceNs));
  const int64_t second_ns = Engine::now_ns();
  fixture.transport.began(1);
  fixture.transport.complete(1);
  ASSERT_TRUE(fixture.transport.await_started(3));
  fixture.transport.complete(2);
  ASSERT_TRUE(fixture.engine.wait_all(kPatienceNs));
  for (const int64_t ticket : {2, 1, 0, -1, 7}) {
    fixture.transport.began(ticket);  // too late, or never started
  }
  fixture.engine.shutdown();
  const std::vector<BlockRecord> blocks = fixture.engine.timeline().back().blocks;
  EXPECT_GE(blocks[0].ready_ns, first_ns);
  EXPECT_LE(blocks[0].finish_ns, second_ns);
  EXPECT_GE(blocks[1].ready_ns, second_ns);
  for (const BlockRecord& block : {blocks[0], blocks[1]}) {
    EXPECT_EQ(block.due_ns, block.ready_ns);
    EXPECT_EQ(block.launch_ns, block.ready_ns);
  }
  EXPECT_LT(blocks[2].ready_ns, first_ns) << "its gradient was there when the block could be sent";
  EXPECT_EQ(fixture.engine.counters().link_ns, together_ns(blocks));
}

TEST(Engine, KeepsNoMoreInFlightThanThePlanSays) {
  Fixture fixture(4, Manner::kByHand, 2);
  fixture.engine.begin();
  for (const int32_t tensor : {3, 2, 1, 0}) {
    fixture.engine.on_ready(tensor);
  }
  ASSERT_TRUE(fixture.transport.await_started(2));
  EXPECT_FALSE(fixture.engine.wait_all(1'000'000));
  EXPECT_EQ(fixture.transport.started().size(), 2U);
  // Blocks may end in any order.
  fixture.transport.complete(1);
  ASSERT_TRUE(fixture.transport.await_started(3));
  EXPECT_TRUE(fixture.engine.wait(std::vector<int32_t>{2}, kPatienceNs));
  EXPECT_EQ(fixture.transport.started().size(), 3U);
  for (const int64_t ticket : {0, 2}) {
    fixture.transport.complete(ticket);
  }
  ASSERT_TRUE(fixture.transport.await_started(4));
  fixture.transport.complete(3);
  EXPECT_TRUE(fixture.engine.wait_all(kPatienceNs));
}

TEST(Engine, TicketsAscendOverIterations) {
  Fixture fixture(2, Manner::kAtOnce);
  for (int64_t iteration = 0; iteration < 3; ++iteration) {
    EXPECT_EQ(fixture.engine.begin(), iteration);
    fixture.engine.on_ready(1);
    fixture.engine.on_ready(0);
    EXPECT_TRUE(fixture.engine.wait_all(kPatienceNs));
  }
  EXPECT_EQ(fixture.transport.started(), std::vector<int64_t>({0, 1, 2, 3, 4, 5}));
}

TEST(Engine, WrongUseIsRefused) {
  const Profile profile = float_tensors(2);
  HandTransport transport;
  Engine engine(transport, {});
  expect_refused([&] { engine.begin(); }, ErrorCode::kInvalidUse, "call follow first");
  expect_refused([&] { engine.wait_all(0); }, ErrorCode::kInvalidUse, "call begin first");
  expect_refused([&] { engine.arrivals(0); }, ErrorCode::kInvalidUse, "call begin first");
  EXPECT_FALSE(engine.busy());
  EXPECT_EQ(engine.waiting_for(), "");

  EXPECT_EQ(engine.follow(profile, block_per_tensor(profile)), 1);
  expect_refused([&] { engine.on_ready(0); }, ErrorCode::kInvalidUse, "call begin first");
  engine.begin();
  for (const int32_t tensor : {-1, 2}) {
    expect_refused([&] { engine.on_ready(tensor); }, ErrorCode::kInvalidUse,
                   "tensor " + std::to_string(tensor) + " does not exist; the profile has 2");
    expect_refused([&] { engine.wait(std::vector<int32_t>{tensor}, 0); }, ErrorCode::kInvalidUse, "does not exist");
  }
  expect_refused([&] { engine.arrivals(-1); }, ErrorCode::kInvalidUse, "position -1");
  engine.on_ready(0);
  expect_refused([&] { engine.on_ready(0); }, ErrorCode::kInvalidUse,
                 "the gradient of t0 was given twice in iteration 0");
  expect_refused([&] { engine.begin(); }, ErrorCode::kInvalidUse, "blocks of iteration 0 are not finished");
  expect_refused([&] { engine.follow(profile, block_per_tensor(profile)); }, ErrorCode::kInvalidUse,
                 "blocks of iteration 0 are not finished");
}

TEST(Engine, PlansAreCheckedAndCountedAndTakeEffectAtTheNextIteration) {
  Fixture fixture(2, Manner::kAtOnce);
  Engine& engine = fixture.engine;
  Plan incomplete = block_per_tensor(fixture.profile);
  incomplete.blocks.pop_back();
  expect_refused([&] { engine.follow(fixture.profile, incomplete); }, ErrorCode::kInvalidPlan, "is in no block");
  expect_refused([&] { engine.follow(Profile{}, Plan{}); }, ErrorCode::kInvalidProfile, "tensors is empty");
  engine.begin();
  engine.on_ready(0);
  engine.on_ready(1);
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

TEST(Engine, SaysWhatItWaitsFor) {
  Fixture fixture(2);
  fixture.engine.begin();
  EXPECT_EQ(fixture.engine.waiting_for(), "block 1 of 2 (t1, 40 B) waits for the gradient of t1");
  fixture.engine.on_ready(1);
  ASSERT_TRUE(fixture.transport.await_started(1));
  EXPECT_TRUE(fixture.engine.waiting_for().starts_with("block 1 of 2 (t1, 40 B) is on the network since "));
  fixture.transport.complete(0);
  ASSERT_TRUE(fixture.engine.wait(std::vector<int32_t>{1}, kPatienceNs));
  EXPECT_EQ(fixture.engine.waiting_for(), "block 2 of 2 (t0, 40 B) waits for the gradient of t0");
  fixture.engine.on_ready(0);
  ASSERT_TRUE(fixture.transport.await_started(2));
  fixture.transport.complete(1);
  ASSERT_TRUE(fixture.engine.wait_all(kPatienceNs));
  EXPECT_EQ(fixture.engine.waiting_for(), "");
}

TEST(Engine, TheRecordSaysWhenThingsHappenedInTheirOrder) {
  Fixture fixture(3, Manner::kAtOnce);
  const int64_t begin_ns = Engine::now_ns();
  fixture.engine.begin();
  for (const int32_t tensor : {2, 1, 0}) {
    fixture.engine.on_ready(tensor);
  }
  ASSERT_TRUE(fixture.engine.wait_all(kPatienceNs));
  const int64_t end_ns = Engine::now_ns();
  const std::vector<IterationRecord> timeline = fixture.engine.timeline();
  ASSERT_EQ(timeline.size(), 1U);
  const IterationRecord& record = timeline.front();
  int64_t last_launch_ns = begin_ns;
  for (size_t block = 0; block < 3; ++block) {
    EXPECT_EQ(record.blocks[block].ready_ns, record.ready_ns[2 - block]);
    EXPECT_GE(record.blocks[block].ready_ns, begin_ns);
    EXPECT_GE(record.blocks[block].launch_ns, record.blocks[block].ready_ns);
    EXPECT_GE(record.blocks[block].launch_ns, last_launch_ns);
    EXPECT_GE(record.blocks[block].finish_ns, record.blocks[block].launch_ns);
    EXPECT_LE(record.blocks[block].finish_ns, end_ns);
    last_launch_ns = record.blocks[block].launch_ns;
  }
}

TEST(Engine, TheNetworkIsBusyWhileABlockIsDue) {
  for (const int32_t in_flight : {1, 3}) {
    Fixture fixture(3, Manner::kAtOnce, in_flight);
    int64_t covered_ns = 0;
    for (int iteration = 0; iteration < 5; ++iteration) {
      fixture.engine.begin();
      for (const int32_t tensor : {2, 1, 0}) {
        fixture.engine.on_ready(tensor);
      }
      ASSERT_TRUE(fixture.engine.wait_all(kPatienceNs));
      covered_ns += together_ns(fixture.engine.timeline().back().blocks);
    }
    EXPECT_EQ(fixture.engine.counters().link_ns, covered_ns);
  }
}

TEST(Engine, ABlockIsDueWhenItIsReadyAndTheOneBeforeItIsOutOfItsWay) {
  for (const int32_t in_flight : {1, 2}) {
    Fixture fixture(3, Manner::kByHand, in_flight);
    fixture.engine.begin();
    fixture.engine.on_ready(2);
    fixture.engine.on_ready(1);
    ASSERT_TRUE(fixture.transport.await_started(static_cast<size_t>(in_flight)));
    fixture.transport.complete(0);
    ASSERT_TRUE(fixture.transport.await_started(2));
    fixture.transport.complete(1);
    ASSERT_TRUE(fixture.engine.wait(std::vector<int32_t>{1}, kPatienceNs));
    fixture.engine.on_ready(0);
    ASSERT_TRUE(fixture.transport.await_started(3));
    fixture.transport.complete(2);
    ASSERT_TRUE(fixture.engine.wait_all(kPatienceNs));
    const std::vector<BlockRecord> blocks = fixture.engine.timeline().back().blocks;
    EXPECT_EQ(blocks[0].due_ns, blocks[0].ready_ns);
    EXPECT_EQ(blocks[1].due_ns,
              std::max(blocks[1].ready_ns, in_flight == 1 ? blocks[0].finish_ns : blocks[0].launch_ns));
    EXPECT_EQ(blocks[2].due_ns, blocks[2].ready_ns) << "nothing was in its way";
    EXPECT_EQ(fixture.engine.counters().link_ns, together_ns(blocks));
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

TEST(Engine, TheTimelineAndItsMemoryAreBounded) {
  Fixture fixture(4, Manner::kAtOnce, 1, {"gradcast", 3});
  int64_t record_bytes = 0;
  for (int64_t iteration = 0; iteration < 20; ++iteration) {
    fixture.engine.begin();
    for (const int32_t tensor : {3, 2, 1, 0}) {
      fixture.engine.on_ready(tensor);
    }
    ASSERT_TRUE(fixture.engine.wait_all(kPatienceNs));
    const EngineCounters counters = fixture.engine.counters();
    EXPECT_EQ(counters.iterations, iteration + 1);
    EXPECT_EQ(counters.blocks, 4 * (iteration + 1));
    EXPECT_EQ(counters.bytes, 160 * (iteration + 1));
    record_bytes = iteration == 2 ? counters.record_bytes : record_bytes;
    EXPECT_TRUE(iteration < 3 || counters.record_bytes == record_bytes);
  }
  std::vector<int64_t> iterations;
  for (const IterationRecord& record : fixture.engine.timeline()) {
    iterations.push_back(record.iteration);
  }
  EXPECT_EQ(iterations, std::vector<int64_t>({17, 18, 19}));
  EXPECT_GT(fixture.engine.counters().loop_ns, 0);
}

TEST(Engine, WaitersOfAnIterationAreServedAlsoWhenTheNextHasBegun) {
  Fixture fixture(1, Manner::kAtOnce);
  for (int round = 0; round < 50; ++round) {
    fixture.engine.begin();
    // Some of these wake only when the next iteration, in which nothing has arrived, is open.
    std::array<std::atomic<pid_t>, 8> ids = {};
    std::vector<std::thread> waiters;
    for (std::atomic<pid_t>& id : ids) {
      waiters.emplace_back([&] {
        id = gettid();
        EXPECT_TRUE(fixture.engine.wait(std::vector<int32_t>{0}, kPatienceNs));
      });
    }
    // One that calls wait() only then would wait for the next iteration, and rightly so.
    for (const std::atomic<pid_t>& id : ids) {
      while (!is_asleep(id)) {
        std::this_thread::yield();
      }
    }
    fixture.engine.on_ready(0);
    ASSERT_TRUE(fixture.engine.wait_all(kPatienceNs));
    fixture.engine.begin();
    for (std::thread& waiter : waiters) {
      waiter.join();
    }
    fixture.engine.on_ready(0);
    ASSERT_TRUE(fixture.engine.wait_all(kPatienceNs));
  }
}

}  // namespace
}  // namespace gradcast
