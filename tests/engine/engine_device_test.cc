// Operations that a device ends by itself: what can be waited for before they have ended, and what the end of the
// engine leaves to the device.
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "gradcast/error.h"
#include "tests/engine/hand_engine.h"
#include "tests/support/refusals.h"

namespace gradcast {
namespace {

TEST(EngineOnDevice, TheNextBlockStartsWhenTheOneBeforeIsQueuedUpToAWindow) {
  BusyEngine fixture(5, 1, HandEngine::Manner::kByHand, {.queue_window = 3});
  for (size_t started = 1; started < 3; ++started) {
    ASSERT_TRUE(fixture.transport.await_started(started));
    EXPECT_EQ(fixture.transport.started().size(), started) << "one at a time that is not queued";
    fixture.transport.queued(static_cast<int64_t>(started) - 1);
  }
  ASSERT_TRUE(fixture.transport.await_started(3));
  fixture.transport.queued(2);
  ASSERT_TRUE(fixture.engine.wait(Tensors{4, 3, 2}, kPatienceNs, Progress::kQueued));
  EXPECT_EQ(fixture.transport.started().size(), 3U) << "the window is full";
  fixture.transport.complete(0);
  ASSERT_TRUE(fixture.transport.await_started(4));
  EXPECT_EQ(fixture.transport.started().size(), 4U);
  const std::vector<BlockRecord> blocks = fixture.engine.timeline().back().blocks;
  EXPECT_GE(blocks[1].launch_ns, blocks[0].finish_ns) << "one at a time is on the wire";
  EXPECT_GE(blocks[1].due_ns, blocks[0].finish_ns);
  EXPECT_LT(blocks[2].launch_ns, blocks[0].finish_ns);
}

TEST(EngineOnDevice, WhatADeviceEndsByItselfCanBeWaitedForBefore) {
  BusyEngine fixture(3, 2, HandEngine::Manner::kByHand, {.queue_window = 2});
  Engine& engine = fixture.engine;
  ASSERT_TRUE(fixture.transport.await_started(2));
  EXPECT_FALSE(engine.wait(Tensors{2}, 0, Progress::kQueued));
  fixture.transport.queued(0);
  EXPECT_TRUE(engine.wait(Tensors{2}, kPatienceNs, Progress::kQueued));
  EXPECT_FALSE(engine.wait(Tensors{2}, 0)) << "the device is not there yet";
  EXPECT_FALSE(engine.wait(Tensors{2, 1}, 0, Progress::kQueued));
  EXPECT_TRUE(engine.arrivals(0).empty());
  EXPECT_EQ(fixture.transport.started().size(), 2U) << "the window is full";
  fixture.transport.complete(1);  // which needs no queue
  EXPECT_TRUE(engine.wait(Tensors{2, 1}, kPatienceNs, Progress::kQueued));
  ASSERT_TRUE(fixture.transport.await_started(3));
  fixture.transport.queued(2);
  EXPECT_TRUE(engine.wait_all(kPatienceNs, Progress::kQueued));
  EXPECT_FALSE(engine.wait_all(0));
  EXPECT_TRUE(engine.busy());
  fixture.transport.complete(0);
  fixture.transport.complete(2);
  EXPECT_TRUE(engine.wait_all(kPatienceNs));
  for (const int64_t ticket : {0, 2, -1, 7}) {
    fixture.transport.queued(ticket);  // too late, or never started
  }
  engine.begin();
  EXPECT_FALSE(engine.wait_all(0, Progress::kQueued)) << "a new iteration";
}

TEST(EngineOnDevice, AnIterationBeginsWhileADeviceEndsTheLastOne) {
  BusyEngine fixture(2, 2, HandEngine::Manner::kByHand, {.timeline_iterations = 1});
  Engine& engine = fixture.engine;
  HandTransport& transport = fixture.transport;
  ASSERT_TRUE(transport.await_started(2));
  transport.queued(0);
  expect_refused([&] { engine.begin(); }, ErrorCode::kInvalidUse, "iteration 0 are not finished");
  transport.queued(1);
  ASSERT_TRUE(engine.wait_all(kPatienceNs, Progress::kQueued));
  EXPECT_EQ(fixture.begin_with_all(), 1);
  ASSERT_TRUE(transport.await_started(4));
  for (const int64_t ticket : {0, 2, 3}) {  // 0 tells nothing new
    transport.queued(ticket);
  }
  ASSERT_TRUE(engine.wait_all(kPatienceNs, Progress::kQueued));
  expect_refused([&] { engine.begin(); }, ErrorCode::kInvalidUse, "iteration 0 are not finished");
  expect_refused([&] { engine.follow(fixture.profile, block_per_tensor(fixture.profile, 2)); }, ErrorCode::kInvalidUse,
                 "not finished");
  EXPECT_FALSE(engine.wait(Tensors{}, 0)) << "of the iteration before";
  EXPECT_NE(engine.waiting_for(), "");
  transport.complete(1);
  transport.complete(0);
  // Without end: who looks again after a while finds out, although nobody has woken it.
  EXPECT_TRUE(engine.wait(Tensors{}, -1));
  EXPECT_TRUE(engine.arrivals(0).empty()) << "what has arrived is of the iteration before";
  EXPECT_EQ(engine.counters().iterations, 1);
  ASSERT_EQ(engine.timeline().size(), 1U);
  EXPECT_EQ(engine.timeline().back().iteration, 1);
  EXPECT_EQ(engine.begin(), 2);
  EXPECT_TRUE(engine.busy());
  transport.complete(2);
  transport.complete(3);
  EXPECT_TRUE(engine.wait(Tensors{}, kPatienceNs));
  EXPECT_EQ(engine.counters().blocks, 4);
  EXPECT_GT(engine.counters().link_ns, 0);
}

TEST(EngineOnDevice, TheTimeOfALinkThatIsNeverIdleGrowsWithEachIteration) {
  HandEngine fixture(1, 1, HandEngine::Manner::kByHand, {.timeline_iterations = 1});
  Engine& engine = fixture.engine;
  HandTransport& transport = fixture.transport;
  fixture.begin_with_all();
  int64_t link_ns = 0;
  for (int64_t ticket = 0; ticket < 5; ++ticket) {
    ASSERT_TRUE(transport.await_started(static_cast<size_t>(ticket) + 1));
    transport.queued(ticket);
    ASSERT_TRUE(engine.wait_all(kPatienceNs, Progress::kQueued));
    fixture.begin_with_all();
    ASSERT_TRUE(transport.await_started(static_cast<size_t>(ticket) + 2));
    transport.complete(ticket);
    ASSERT_TRUE(engine.wait(Tensors{}, kPatienceNs));
    EXPECT_GT(engine.counters().link_ns, link_ns);
    link_ns = engine.counters().link_ns;
  }
  transport.queued(5);
  transport.complete(5);
  EXPECT_TRUE(engine.wait_all(kPatienceNs));
}

TEST(EngineOnDevice, TheDevicesOwnTimesAreRecorded) {
  BusyEngine fixture(2, 2);
  Engine& engine = fixture.engine;
  ASSERT_TRUE(fixture.transport.await_started(2));
  fixture.transport.timed(0, 20'000);
  fixture.transport.complete(0);
  fixture.transport.queued(1);
  ASSERT_TRUE(engine.wait_all(kPatienceNs, Progress::kQueued));
  fixture.begin_with_all();
  fixture.transport.timed(1, 30'000);  // of the last iteration
  fixture.transport.complete(1);
  for (const int64_t ticket : {0, -1, 7}) {
    fixture.transport.timed(ticket, 5);  // too late, or never started
  }
  ASSERT_TRUE(engine.wait(Tensors{}, kPatienceNs));
  const std::vector<BlockRecord> blocks = engine.timeline().front().blocks;
  EXPECT_EQ(blocks[0].device_ns, 20'000);
  EXPECT_EQ(blocks[1].device_ns, 30'000);
  EXPECT_EQ(engine.timeline().back().blocks[0].device_ns, 0);
}

TEST(EngineOnDevice, WhatEndsWhileAnIterationBeginsIsOfTheLastOne) {
  constexpr int64_t kIterations = 3000;
  HandEngine fixture(1, 1, HandEngine::Manner::kByHand, {.timeline_iterations = 1});
  std::thread device([&] {
    for (int64_t ticket = 0; ticket < kIterations; ++ticket) {
      if (!fixture.transport.await_started(static_cast<size_t>(ticket) + 1)) return;
      fixture.transport.queued(ticket);
      fixture.transport.complete(ticket);
    }
  });
  bool is_well = true;
  for (int64_t iteration = 0; iteration < kIterations && is_well; ++iteration) {
    fixture.begin_with_all();
    is_well = fixture.engine.wait_all(kPatienceNs, Progress::kQueued) && fixture.engine.wait(Tensors{}, kPatienceNs);
  }
  EXPECT_TRUE(is_well);
  EXPECT_TRUE(fixture.engine.wait_all(kPatienceNs));
  EXPECT_FALSE(fixture.engine.busy());
  EXPECT_EQ(fixture.engine.counters().iterations, kIterations);
  device.join();
}

TEST(EngineOnDevice, AFailureOfTheLastIterationIsOneOfTheOpenOne) {
  BusyEngine fixture(1, 1);
  ASSERT_TRUE(fixture.transport.await_started(1));
  fixture.transport.queued(0);
  ASSERT_TRUE(fixture.engine.wait_all(kPatienceNs, Progress::kQueued));
  fixture.engine.begin();
  fixture.transport.complete(0, "the cable is gone");
  expect_refused([&] { fixture.engine.wait_all(kPatienceNs); }, ErrorCode::kCommunication, "the cable is gone");
  expect_refused([&] { fixture.engine.begin(); }, ErrorCode::kCommunication, "the cable is gone");
}

TEST(EngineOnDevice, WhatADeviceEndsOfTheLastIterationIsNotAbortedAtTheEnd) {
  BusyEngine fixture(1, 1);
  ASSERT_TRUE(fixture.transport.await_started(1));
  fixture.transport.queued(0);
  ASSERT_TRUE(fixture.engine.wait_all(kPatienceNs, Progress::kQueued));
  fixture.engine.begin();
  std::thread device([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    fixture.transport.complete(0);
  });
  fixture.engine.shutdown();
  device.join();
  EXPECT_TRUE(fixture.transport.abort_reasons().empty());
  EXPECT_TRUE(fixture.transport.closed());
}

TEST(EngineOnDevice, SaysWhatComesAlongOnADevice) {
  BusyEngine fixture(4, 3);
  Engine& engine = fixture.engine;
  ASSERT_TRUE(fixture.transport.await_started(3));
  EXPECT_TRUE(engine.queued_no_later_than(Tensors{2}, 0).empty());
  for (const int64_t ticket : {0, 1, 2}) {
    fixture.transport.queued(ticket);
  }
  ASSERT_TRUE(engine.wait(Tensors{1, 2, 3}, kPatienceNs, Progress::kQueued));
  EXPECT_EQ(engine.queued_no_later_than(Tensors{2}, 0), Tensors({3, 2})) << "1 comes later than 2";
  EXPECT_EQ(engine.queued_no_later_than(Tensors{3, 1}, 0), Tensors({3, 2, 1}));
  EXPECT_EQ(engine.queued_no_later_than(Tensors{0}, 0), Tensors({3, 2, 1})) << "0 is not there yet";
  EXPECT_EQ(engine.queued_no_later_than(Tensors{1}, 2), Tensors({1})) << "the caller knows of 3 and 2";
  EXPECT_TRUE(engine.queued_no_later_than(Tensors{2}, 2).empty());
  EXPECT_TRUE(engine.queued_no_later_than(Tensors{0}, 9).empty());
  expect_refused([&] { engine.queued_no_later_than(Tensors{4}, 0); }, ErrorCode::kInvalidUse, "does not exist");
  expect_refused([&] { engine.queued_no_later_than(Tensors{2}, -1); }, ErrorCode::kInvalidUse, "count from 0");
}

TEST(EngineOnDevice, WhoWaitsForADeviceHearsOfAFailure) {
  BusyEngine fixture(1, 1);
  ASSERT_TRUE(fixture.transport.await_started(1));
  fixture.transport.queued(0);
  EXPECT_TRUE(fixture.engine.wait_all(kPatienceNs, Progress::kQueued));
  fixture.transport.complete(0, "the cable is gone");
  expect_refused([&] { fixture.engine.wait_all(kPatienceNs); }, ErrorCode::kCommunication, "the cable is gone");
  expect_refused([&] { fixture.engine.wait_all(kPatienceNs, Progress::kQueued); }, ErrorCode::kCommunication,
                 "the cable is gone");
}

TEST(EngineOnDevice, WhatADeviceEndsByItselfIsNotAbortedAtTheEnd) {
  BusyEngine fixture(2, 2);
  ASSERT_TRUE(fixture.transport.await_started(2));
  fixture.transport.queued(0);
  fixture.transport.queued(1);
  std::thread device([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    fixture.transport.complete(0);
    fixture.transport.complete(1);
  });
  fixture.engine.shutdown();
  device.join();
  EXPECT_TRUE(fixture.transport.abort_reasons().empty());
  EXPECT_TRUE(fixture.transport.closed());
}

TEST(EngineOnDevice, ADeviceThatDoesNotEndIsAbortedAtTheEndAllTheSame) {
  for (const bool is_all : {false, true}) {
    BusyEngine fixture(2, 2);
    ASSERT_TRUE(fixture.transport.await_started(2));
    fixture.transport.queued(0);
    if (is_all) {
      fixture.transport.queued(1);
    }
    fixture.engine.shutdown();
    EXPECT_EQ(fixture.transport.abort_reasons(), std::vector<std::string>({"the engine was shut down"}));
    EXPECT_TRUE(fixture.transport.closed());
  }
}

}  // namespace
}  // namespace gradcast
