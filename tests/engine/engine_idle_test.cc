// An engine that has nothing to do sleeps: no busy waiting, in no state.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <ctime>
#include <thread>

#include "tests/engine/engine_ranks.h"

namespace gradcast {
namespace {

constexpr int64_t kHourNs = 3'600'000'000'000;

// CPU time of all threads of the process while this one sleeps.
double cpu_ms_of(std::chrono::milliseconds nap) {
  const auto cpu_ms = [] {
    timespec time{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return 1e3 * static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_nsec);
  };
  const double begin_ms = cpu_ms();
  std::this_thread::sleep_for(nap);
  return cpu_ms() - begin_ms;
}

// Far below what one spinning thread would use, far above what sleeping threads do on a busy machine.
constexpr double kCpuMsMax = 20;

TEST(EngineIdle, UsesNoCpuInAnyState) {
  const Profile profile = float_tensors(3);
  EngineRanks ranks(2, profile);
  ranks.world.delay(1, 1, kHourNs);
  EXPECT_LT(cpu_ms_of(std::chrono::milliseconds(300)), kCpuMsMax) << "without a plan";
  for (const int32_t rank : {0, 1}) {
    ranks.engine(rank).follow(profile, block_per_tensor(profile));
    ranks.engine(rank).begin();
  }
  EXPECT_LT(cpu_ms_of(std::chrono::milliseconds(300)), kCpuMsMax) << "without gradients";
  for (const int32_t rank : {0, 1}) {
    ranks.give_all(rank, 0);
  }
  for (const int32_t rank : {0, 1}) {
    ASSERT_TRUE(ranks.engine(rank).wait(std::vector<int32_t>{2}, kPatienceNs));
  }
  EXPECT_LT(cpu_ms_of(std::chrono::milliseconds(300)), kCpuMsMax) << "with a block on the network";
  std::thread waiter([&] { EXPECT_FALSE(ranks.engine(0).wait_all(400'000'000)); });
  EXPECT_LT(cpu_ms_of(std::chrono::milliseconds(300)), kCpuMsMax) << "with a thread that waits";
  waiter.join();
}

}  // namespace
}  // namespace gradcast
