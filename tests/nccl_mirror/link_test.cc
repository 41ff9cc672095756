#include "benchmarks/nccl_mirror/link.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace nccl_mirror {
namespace {

constexpr Link kLink = Link::of(/*gbit_per_s=*/10, /*latency_us=*/50);

class SharedLink {
 public:
  uint64_t take(uint64_t now_ns, uint64_t for_ns) {
    return take_link(now_ns, for_ns, [this](uint64_t expected, uint64_t desired) {
      free_ns_.compare_exchange_strong(expected, desired);
      return expected;
    });
  }

 private:
  std::atomic<uint64_t> free_ns_{0};
};

TEST(MirroredLink, AnOperationCostsItsLatencyAndItsBytes) {
  EXPECT_EQ(duration_ns(kLink, 1e6, /*is_first=*/true), 50'000u + 800'000u);
  EXPECT_EQ(duration_ns(kLink, 1e6, /*is_first=*/false), 800'000u);
  EXPECT_EQ(duration_ns(kLink, 0, /*is_first=*/true), 50'000u);
}

TEST(MirroredLink, BytesAreThoseOfBandwidthOptimalAlgorithms) {
  EXPECT_DOUBLE_EQ(wire_bytes(Traffic::kReduceAndGather, 1600, 16), 3000);
  EXPECT_DOUBLE_EQ(wire_bytes(Traffic::kHalf, 1600, 16), 1500);
  EXPECT_DOUBLE_EQ(wire_bytes(Traffic::kThrough, 1600, 16), 1600);
  for (const Traffic traffic : {Traffic::kReduceAndGather, Traffic::kHalf, Traffic::kThrough})
    EXPECT_EQ(wire_bytes(traffic, 1600, 1), 0);
}

TEST(MirroredLink, AnIdleLinkIsTakenAtOnce) {
  SharedLink link;
  EXPECT_EQ(link.take(1000, 70), 1070u);
  EXPECT_EQ(link.take(2000, 70), 2070u);  // the pause is not made up for
}

TEST(MirroredLink, OperationsThatComeTooEarlyFollowEachOther) {
  SharedLink link;
  EXPECT_EQ(link.take(1000, 70), 1070u);
  EXPECT_EQ(link.take(1010, 30), 1100u);
  EXPECT_EQ(link.take(1020, 5), 1105u);
  EXPECT_EQ(link.take(1105, 1), 1106u);
}

// Kernels of several communicators take it at the same time.
TEST(MirroredLink, CommunicatorsShareIt) {
  constexpr int kCommunicators = 4;
  constexpr int kOperations = 2000;
  SharedLink link;
  std::vector<std::vector<uint64_t>> ends_ns(kCommunicators);
  std::vector<std::thread> threads;
  for (auto& own : ends_ns)
    threads.emplace_back([&] {
      for (int i = 0; i < kOperations; ++i)
        own.push_back(link.take(100, 10));
    });
  for (std::thread& thread : threads)
    thread.join();
  std::vector<uint64_t> all;
  for (const auto& own : ends_ns) {
    EXPECT_TRUE(std::ranges::is_sorted(own));
    all.insert(all.end(), own.begin(), own.end());
  }
  std::ranges::sort(all);
  for (size_t i = 0; i < all.size(); ++i)
    ASSERT_EQ(all[i], 100 + 10 * (i + 1)) << "two operations were on the link at once, or it was idle";
}

}  // namespace
}  // namespace nccl_mirror
