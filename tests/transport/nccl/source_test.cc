// The transport over NCCL, on the tests' own device, where an operation reads other memory than it writes, in bfloat16;
// and the time that it takes on its stream.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "gradcast/nccl.h"
#include "tests/support/recording_sink.h"
#include "tests/transport/nccl/fake_device.h"
#include "transport/common/numbers.h"

namespace gradcast {
namespace {

constexpr int32_t kRanks = 2;

std::vector<BFloat16> numbers(const std::vector<float>& values) {
  std::vector<BFloat16> found;
  std::ranges::transform(values, std::back_inserter(found), [](float value) { return BFloat16(value); });
  return found;
}

std::vector<float> values(const std::vector<BFloat16>& found) {
  std::vector<float> floats;
  std::ranges::transform(found, std::back_inserter(floats), [](BFloat16 value) { return static_cast<float>(value); });
  return floats;
}

// The memory of one rank behind an operation: what it read, and what it wrote, where nothing was written -1.
struct Memory {
  std::vector<float> source;
  std::vector<float> data;
};

std::vector<Memory> after(Op op, int64_t elements) {
  const std::string id = new_nccl_id();
  std::vector<Memory> found(kRanks);
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      cudaSetDevice(rank);
      std::vector<BFloat16> source = numbers({1, 2, 3, 4});
      for (BFloat16& each : source)
        each = each + BFloat16(10.0F * static_cast<float>(rank));
      std::vector<BFloat16> data = numbers({-1, -1, -1, -1});
      RecordingSink sink;
      const auto transport = make_nccl_transport(
          id, rank, kRanks, {{data.data(), 8, Element::kBFloat16, source.data()}}, {.device = rank});
      transport->open(&sink);
      const Range range{0, 2 * elements};
      transport->start({0, op, 0, &range, 1});
      EXPECT_EQ(sink.end_of(0), "");
      transport->close();
      found[static_cast<size_t>(rank)] = {values(source), values(data)};
    });
  }
  for (std::thread& each : threads)
    each.join();
  fake::end_streams();
  EXPECT_EQ(found[0].source, std::vector<float>({1, 2, 3, 4}));
  EXPECT_EQ(found[1].source, std::vector<float>({11, 12, 13, 14}));
  return found;
}

TEST(NcclSource, AllReduce) {
  for (const Memory& rank : after(Op::kAllReduce, 3)) {
    EXPECT_EQ(rank.data, std::vector<float>({12, 14, 16, -1}));
  }
}

TEST(NcclSource, ReduceScatterWithEqualParts) {
  const std::vector<Memory> ranks = after(Op::kReduceScatter, 4);
  EXPECT_EQ(ranks[0].data, std::vector<float>({12, 14, -1, -1}));
  EXPECT_EQ(ranks[1].data, std::vector<float>({-1, -1, 16, 18}));
}

TEST(NcclSource, ReduceScatterThatIsPacked) {
  const std::vector<Memory> ranks = after(Op::kReduceScatter, 3);
  EXPECT_EQ(ranks[0].data[0], 12);
  EXPECT_EQ(ranks[0].data[1], 14);
  EXPECT_EQ(ranks[1].data[2], 16);
}

TEST(NcclSource, AllGather) {
  for (const int64_t elements : {3, 4}) {
    for (const Memory& rank : after(Op::kAllGather, elements)) {
      EXPECT_EQ(rank.data, std::vector<float>({1, 2, 13, elements == 3 ? -1.0F : 14.0F}));
    }
  }
}

TEST(NcclStreamTime, IsToldOfEachOperationBeforeItsEnd) {
  std::vector<int64_t> times_ns;  // written by the transport's thread before each completion
  std::vector<float> data(4, 1.0F);
  RecordingSink sink;
  const auto transport = make_nccl_transport(new_nccl_id(), 0, 1, {{data.data(), 16}},
                                             {.on_stream_time = [&](int64_t time_ns) { times_ns.push_back(time_ns); }});
  transport->open(&sink);
  const Range range{0, 16};
  for (int64_t ticket = 0; ticket < 3; ++ticket) {
    transport->start({ticket, Op::kAllReduce, 0, &range, 1});
    EXPECT_EQ(sink.end_of(ticket), "");
    EXPECT_EQ(times_ns.size(), static_cast<size_t>(ticket + 1));
    EXPECT_GE(times_ns.back(), 0);
  }
  transport->close();
  fake::end_streams();
}

}  // namespace
}  // namespace gradcast
