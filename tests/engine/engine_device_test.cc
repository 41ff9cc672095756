// Operations that a device ends by itself: what can be waited for before they have ended, and what the end of the
// engine leaves to the device.
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "gradcast/engine.h"
#include "gradcast/error.h"
#include "tests/engine/engine_ranks.h"
#include "tests/engine/hand_transport.h"
#include "tests/support/refusals.h"

namespace gradcast {
namespace {

// An engine that follows one block per tensor, the last tensor first, and has been given all gradients.
struct Fixture {
  Fixture(int32_t tensor_count, int32_t in_flight) : profile(float_tensors(tensor_count)), engine(transport, {}) {
    engine.follow(profile, block_per_tensor(profile, in_flight));
    engine.begin();
    for (int32_t tensor = tensor_count - 1; tensor >= 0; --tensor) {
      engine.on_ready(tensor);
    }
  }

  Profile profile;
  HandTransport transport;
  Engine engine;
};

TEST(EngineOnDevice, WhatADeviceEndsByItselfCanBeWaitedForBefore) {
  Fixture fixture(3, 2);
  Engine& engine = fixture.engine;
  ASSERT_TRUE(fixture.transport.await_started(2));
  EXPECT_FALSE(engine.wait(std::vector<int32_t>{2}, 0, Progress::kQueued));
  fixture.transport.queued(0);
  EXPECT_TRUE(engine.wait(std::vector<int32_t>{2}, kPatienceNs, Progress::kQueued));
  EXPECT_FALSE(engine.wait(std::vector<int32_t>{2}, 0)) << "the device is not there yet";
  EXPECT_FALSE(engine.wait(std::vector<int32_t>{2, 1}, 0, Progress::kQueued));
  EXPECT_TRUE(engine.arrivals(0).empty());
  EXPECT_EQ(fixture.transport.started().size(), 2U) << "it still counts as in flight";
  fixture.transport.complete(1);  // which needs no queue
  EXPECT_TRUE(engine.wait(std::vector<int32_t>{2, 1}, kPatienceNs, Progress::kQueued));
  ASSERT_TRUE(fixture.transport.await_started(3));
  fixture.transport.queued(2);
  EXPECT_TRUE(engine.wait_all(kPatienceNs, Progress::kQueued));
  EXPECT_FALSE(engine.wait_all(0));
  EXPECT_TRUE(engine.busy());
  expect_refused([&] { engine.begin(); }, ErrorCode::kInvalidUse, "not finished");
  fixture.transport.complete(0);
  fixture.transport.complete(2);
  EXPECT_TRUE(engine.wait_all(kPatienceNs));
  for (const int64_t ticket : {0, 2, -1, 7}) {
    fixture.transport.queued(ticket);  // too late, or never started
  }
  engine.begin();
  EXPECT_FALSE(engine.wait_all(0, Progress::kQueued)) << "a new iteration";
}

TEST(EngineOnDevice, SaysWhatComesAlongOnADevice) {
  Fixture fixture(4, 3);
  Engine& engine = fixture.engine;
  ASSERT_TRUE(fixture.transport.await_started(3));
  EXPECT_TRUE(engine.queued_no_later_than(std::vector<int32_t>{2}).empty());
  for (const int64_t ticket : {0, 1, 2}) {
    fixture.transport.queued(ticket);
  }
  ASSERT_TRUE(engine.wait(std::vector<int32_t>{1, 2, 3}, kPatienceNs, Progress::kQueued));
  EXPECT_EQ(engine.queued_no_later_than(std::vector<int32_t>{2}), std::vector<int32_t>({2, 3}))
      << "1 comes later than 2";
  EXPECT_EQ(engine.queued_no_later_than(std::vector<int32_t>{3, 1}), std::vector<int32_t>({1, 2, 3}));
  EXPECT_EQ(engine.queued_no_later_than(std::vector<int32_t>{0}), std::vector<int32_t>({1, 2, 3}))
      << "0 is not there yet";
  expect_refused([&] { engine.queued_no_later_than(std::vector<int32_t>{4}); }, ErrorCode::kInvalidUse,
                 "does not exist");
  for (const int64_t ticket : {0, 1, 2}) {
    fixture.transport.complete(ticket);
  }
  ASSERT_TRUE(fixture.transport.await_started(4));
  fixture.transport.complete(3);
  ASSERT_TRUE(engine.wait_all(kPatienceNs));
  EXPECT_TRUE(engine.queued_no_later_than(std::vector<int32_t>{0}).empty()) << "all have arrived";
}

TEST(EngineOnDevice, WhoWaitsForADeviceHearsOfAFailure) {
  Fixture fixture(1, 1);
  ASSERT_TRUE(fixture.transport.await_started(1));
  fixture.transport.queued(0);
  EXPECT_TRUE(fixture.engine.wait_all(kPatienceNs, Progress::kQueued));
  fixture.transport.complete(0, "the cable is gone");
  expect_refused([&] { fixture.engine.wait_all(kPatienceNs); }, ErrorCode::kCommunication, "the cable is gone");
  expect_refused([&] { fixture.engine.wait_all(kPatienceNs, Progress::kQueued); }, ErrorCode::kCommunication,
                 "the cable is gone");
}

TEST(EngineOnDevice, WhatADeviceEndsByItselfIsNotAbortedAtTheEnd) {
  Fixture fixture(2, 2);
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
    Fixture fixture(2, 2);
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
