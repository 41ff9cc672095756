// Failures and the end: every operation is drained, the first error is raised by every later call, nobody waits for
// ever.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
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
constexpr int64_t kHourNs = 3'600'000'000'000;

std::string error_of(const std::function<void()>& action, ErrorCode code) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(to_string(error.code()), to_string(code)) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error was raised";
  return "";
}

// --- One engine on a network completed by hand. ---

// What an engine leaves behind for a transport that breaks its promises is meant to stay; with the transport it stays
// where a leak checker finds it.
std::shared_ptr<HandTransport> kept_for_good(std::shared_ptr<HandTransport> transport) {
  static auto* const kept = new std::vector<std::shared_ptr<HandTransport>>();
  kept->push_back(transport);
  return transport;
}

TEST(EngineFailure, TheFirstErrorNamesItsBlockAndIsRaisedByEveryLaterCall) {
  BusyEngine fixture(3, 2);
  ASSERT_TRUE(fixture.transport.await_started(2));
  fixture.transport.complete(1, "the peer hung up");
  const std::string expected = "block 2 of 3 (t1, 40 B) failed on rank 2 of 5: the peer hung up";
  for (int i = 0; i < 2; ++i) {
    for (const std::function<void()>& call : std::vector<std::function<void()>>{
             [&] { fixture.engine.wait_all(kPatienceNs); }, [&] { fixture.engine.wait(Tensors{0}, kPatienceNs); },
             [&] { fixture.engine.begin(); },
             [&] { fixture.engine.follow(fixture.profile, block_per_tensor(fixture.profile)); }}) {
      EXPECT_EQ(error_of(call, ErrorCode::kCommunication), expected);
    }
  }
  EXPECT_EQ(fixture.transport.abort_reasons(), std::vector<std::string>({expected}));
  EXPECT_EQ(fixture.transport.started().size(), 2U) << "nothing is started after a failure";
  EXPECT_FALSE(fixture.engine.busy());
  EXPECT_EQ(fixture.engine.waiting_for(), "");
  fixture.engine.shutdown();
  EXPECT_TRUE(fixture.transport.closed());
}

TEST(EngineFailure, AFailureIsAbortedAlsoWhenNothingElseIsInFlight) {
  BusyEngine fixture(2);
  ASSERT_TRUE(fixture.transport.finish(0, "no route"));
  error_of([&] { fixture.engine.wait_all(kPatienceNs); }, ErrorCode::kCommunication);
  EXPECT_EQ(fixture.transport.abort_reasons().size(), 1U);
}

TEST(EngineFailure, WhatArrivedBeforeStaysKnownAndGradientsMayStillCome) {
  HandEngine hand(3);
  Engine& engine = hand.engine;
  engine.begin();
  engine.on_ready(2);
  engine.on_ready(1);
  ASSERT_TRUE(hand.transport.finish(0));
  ASSERT_TRUE(hand.transport.finish(1, "gone"));
  error_of([&] { engine.wait_all(kPatienceNs); }, ErrorCode::kCommunication);
  EXPECT_EQ(engine.arrivals(0), Tensors({2}));
  // Backward runs on after a failure; it hears of it where it waits.
  engine.on_ready(0);
  EXPECT_EQ(engine.timeline().front().blocks[1].finish_ns, 0);
}

TEST(EngineFailure, WaitersHearOfAFailureOnlyWhenNothingIsInFlightAnyMore) {
  // Stubborn: the abort does not complete the other operation, the test does, later.
  BusyEngine fixture(2, 2, Manner::kStubborn);
  ASSERT_TRUE(fixture.transport.await_started(2));
  fixture.transport.complete(0, "gone");
  EXPECT_FALSE(fixture.engine.wait_all(50'000'000)) << "the buffers are still in use";
  fixture.transport.complete(1);
  error_of([&] { fixture.engine.wait_all(kPatienceNs); }, ErrorCode::kCommunication);
  EXPECT_EQ(fixture.engine.arrivals(0), Tensors({0})) << "what arrived meanwhile has arrived";
}

TEST(EngineFailure, ACompletionOfWhatIsNotInFlightIsADefect) {
  for (const int64_t ticket : {0, 7, -1}) {
    SCOPED_TRACE("ticket " + std::to_string(ticket));
    BusyEngine fixture(2);
    ASSERT_TRUE(fixture.transport.finish(0));
    ASSERT_TRUE(fixture.transport.await_started(2));
    fixture.transport.complete(ticket);
    const std::string error = error_of([&] { fixture.engine.wait_all(kPatienceNs); }, ErrorCode::kInternal);
    EXPECT_NE(error.find("completed operation " + std::to_string(ticket)), std::string::npos) << error;
  }
}

TEST(EngineFailure, ATransportThatFloodsTheQueueIsADefectAndDoesNotKeepTheEngineAlive) {
  BusyEngine fixture(2);
  kept_for_good(fixture.own_transport);
  ASSERT_TRUE(fixture.transport.await_started(1));
  for (int i = 0; i < 10'000; ++i) {
    fixture.transport.complete(99);
  }
  error_of([&] { fixture.engine.wait_all(kPatienceNs); }, ErrorCode::kInternal);
  fixture.engine.shutdown();
}

// --- The end. ---

TEST(EngineShutdown, IsIdempotentAndLeavesTheRecordReadable) {
  BusyEngine fixture(1, 1, Manner::kAtOnce);
  ASSERT_TRUE(fixture.engine.wait_all(kPatienceNs));
  fixture.engine.shutdown();
  fixture.engine.shutdown();
  EXPECT_TRUE(fixture.transport.closed());
  EXPECT_TRUE(fixture.transport.abort_reasons().empty()) << "nothing was in flight";
  Engine& engine = fixture.engine;
  for (const std::function<void()>& call : std::vector<std::function<void()>>{
           [&] { engine.follow(fixture.profile, block_per_tensor(fixture.profile)); }, [&] { engine.begin(); },
           [&] { engine.on_ready(0); }, [&] { engine.wait(Tensors{0}, 0); }, [&] { engine.wait_all(0); },
           [&] { engine.arrivals(0); }, [&] { engine.busy(); }, [&] { engine.waiting_for(); }}) {
    expect_refused(call, ErrorCode::kInvalidUse, "the engine has been shut down");
  }
  EXPECT_EQ(engine.timeline().size(), 1U);
  EXPECT_EQ(engine.counters().blocks, 1);
}

TEST(EngineShutdown, ByManyThreadsAtOnceEndsOnce) {
  BusyEngine fixture(2, 2);
  ASSERT_TRUE(fixture.transport.await_started(2));
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      fixture.engine.shutdown();
      EXPECT_TRUE(fixture.transport.closed()) << "shutdown returned before the end";
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(fixture.transport.abort_reasons(), std::vector<std::string>({"the engine was shut down"}));
}

TEST(EngineShutdown, AnEngineThatNeverBeganEnds) {
  HandTransport transport;
  { Engine engine(transport, {}); }
  EXPECT_TRUE(transport.closed());
  EXPECT_TRUE(transport.abort_reasons().empty());
}

// Threads that wait for an engine, and what they were told. Once this is made, all of them stand inside wait_all().
class Waiters {
 public:
  Waiters(Engine& engine, int count) : ids_(static_cast<size_t>(count)) {
    for (int i = 0; i < count; ++i) {
      threads_.emplace_back([this, &engine, i] {
        ids_[i] = gettid();
        const std::string error = error_of([&] { engine.wait_all(-1); }, ErrorCode::kCommunication);
        EXPECT_NE(error.find("shut down while iteration 0 was waited for"), std::string::npos) << error;
      });
    }
    const int64_t deadline_ns = Engine::now_ns() + kPatienceNs;
    while (!std::ranges::all_of(ids_, is_asleep) && Engine::now_ns() < deadline_ns) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  ~Waiters() {
    for (std::thread& thread : threads_) {
      thread.join();
    }
  }

 private:
  std::vector<std::atomic<pid_t>> ids_;
  std::vector<std::thread> threads_;
};

TEST(EngineShutdown, WaitersAreToldAlsoWhenTheEngineIsDestroyed) {
  BusyEngine fixture(2);
  ASSERT_TRUE(fixture.transport.await_started(1));
  const Waiters waiters(fixture.engine, 100);
  fixture.own_engine.reset();
  EXPECT_TRUE(fixture.transport.closed());
}

TEST(EngineShutdown, WaitersForAGradientThatNeverComesAreToldToo) {
  HandEngine hand(2);
  hand.engine.begin();
  const Waiters waiters(hand.engine, 2);
  hand.own_engine.reset();
  EXPECT_TRUE(hand.transport.abort_reasons().empty());
}

TEST(EngineShutdown, ATransportThatHoldsOnToAnOperationIsLeftBehind) {
  BusyEngine fixture(2, 2, Manner::kStubborn);
  const std::shared_ptr<HandTransport> transport = kept_for_good(fixture.own_transport);
  ASSERT_TRUE(transport->await_started(2));
  fixture.engine.shutdown();
  EXPECT_FALSE(transport->closed()) << "close() demands that everything has completed";
  fixture.own_engine.reset();
  transport->complete(0);
  transport->complete(1, "late");
}

// --- Several ranks. ---

class EngineFailureAt : public testing::TestWithParam<int32_t> {};

TEST_P(EngineFailureAt, TheRankThatFailsSaysSoAndTheOthersHearOfIt) {
  const int32_t world_size = GetParam();
  const Profile profile = float_tensors(3);
  // Operations 0-2 are the first iteration, 3-5 the second.
  for (int32_t failing = 0; failing < world_size; ++failing) {
    for (const int64_t operation : {0, 2, 3, 4}) {
      SCOPED_TRACE("rank " + std::to_string(failing) + ", operation " + std::to_string(operation));
      EngineRanks ranks(world_size, profile);
      ranks.world.fail(failing, operation, "the cable is cut");
      const std::string block = "block " + std::to_string(operation % 3 + 1) + " of 3 (t" +
                                std::to_string(2 - operation % 3) + ", 40 B) failed on rank ";
      const std::string cause =
          block + std::to_string(failing) + " of " + std::to_string(world_size) + ": the cable is cut";
      ranks.on_every_rank([&](int32_t rank) {
        Engine& engine = ranks.engine(rank);
        engine.follow(profile, block_per_tensor(profile, 2));
        for (int64_t iteration = 0; iteration < operation / 3; ++iteration) {
          engine.begin();
          ranks.give_all(rank, iteration);
          ASSERT_TRUE(engine.wait_all(kPatienceNs));
          ranks.expect_all_sums(rank, iteration);
        }
        engine.begin();
        ranks.give_all(rank, operation / 3);
        const std::string error = error_of([&] { engine.wait_all(kPatienceNs); }, ErrorCode::kCommunication);
        if (rank == failing) {
          EXPECT_EQ(error, cause);
        } else {
          EXPECT_NE(error.find("rank " + std::to_string(failing) + " has left: " + cause), std::string::npos) << error;
        }
        engine.shutdown();
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, EngineFailureAt, testing::Values(1, 2, 3, 4));

TEST(EngineFailure, ARankThatIsLateIsWaitedForAsLongAsOneLikes) {
  const Profile profile = float_tensors(2);
  EngineRanks ranks(2, profile);
  ranks.world.delay(1, 1, kHourNs);
  ranks.on_every_rank([&](int32_t rank) {
    ranks.engine(rank).follow(profile, block_per_tensor(profile));
    ranks.engine(rank).begin();
    ranks.give_all(rank, 0);
    EXPECT_TRUE(ranks.engine(rank).wait(Tensors{1}, kPatienceNs));
    EXPECT_FALSE(ranks.engine(rank).wait_all(20'000'000));
    EXPECT_TRUE(ranks.engine(rank).waiting_for().starts_with("block 2 of 2 (t0, 40 B) is on the network since "));
  });
  // The late rank is ended in the middle of its operation; the other one hears of it.
  ranks.engine(1).shutdown();
  const std::string error = error_of([&] { ranks.engine(0).wait_all(kPatienceNs); }, ErrorCode::kCommunication);
  EXPECT_NE(error.find("rank 1 has left: the engine was shut down"), std::string::npos) << error;
}

TEST(EngineShutdown, InTheMiddleOfTrafficAtAnyMoment) {
  const Profile profile = float_tensors(6);
  for (int64_t pause_us = 0; pause_us < 1000; pause_us += 40) {
    SCOPED_TRACE("after " + std::to_string(pause_us) + " us");
    EngineRanks ranks(2, profile, {5e4, 0});
    std::atomic<bool> ended = false;
    std::thread killer([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(pause_us));
      ranks.engine(0).shutdown();
      ended = true;
    });
    ranks.on_every_rank([&](int32_t rank) {
      try {
        ranks.engine(rank).follow(profile, block_per_tensor(profile, 2));
        for (int64_t iteration = 0; iteration < 1000 && !ended; ++iteration) {
          ranks.engine(rank).begin();
          ranks.give_all(rank, iteration);
          ASSERT_TRUE(ranks.engine(rank).wait_all(kPatienceNs));
          ranks.expect_all_sums(rank, iteration);
        }
      } catch (const Error& error) {
        EXPECT_TRUE(error.code() == ErrorCode::kCommunication || error.code() == ErrorCode::kInvalidUse)
            << error.what();
      }
      if (rank == 1) {
        ranks.engine(rank).shutdown();
      }
    });
    killer.join();
  }
}

}  // namespace
}  // namespace gradcast
