// Operations that read other memory than they write, between ranks in threads; and bfloat16, in which they sum.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "gradcast/inproc.h"
#include "tests/support/recording_sink.h"
#include "transport/common/numbers.h"

namespace gradcast {
namespace {

float rounded(float value) {
  return static_cast<float>(BFloat16(value));
}

TEST(BFloat16Numbers, RoundToTheNearest) {
  constexpr float kStep = 1.0F / 128;  // between the numbers above 1
  EXPECT_EQ(rounded(1 + 0.4F * kStep), 1);
  EXPECT_EQ(rounded(1 + 0.6F * kStep), 1 + kStep);
  EXPECT_EQ(rounded(1 + 0.5F * kStep), 1) << "of two that are as near, the even one";
  EXPECT_EQ(rounded(1 + 1.5F * kStep), 1 + 2 * kStep);
  EXPECT_EQ(rounded(-1 - 1.5F * kStep), -1 - 2 * kStep);
}

TEST(BFloat16Numbers, KeepWhatIsNotFinite) {
  EXPECT_EQ(rounded(std::numeric_limits<float>::infinity()), std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(rounded(std::bit_cast<float>(0x7fffffff)))) << "rounded up it would be -0";
  EXPECT_TRUE(std::isnan(rounded(std::bit_cast<float>(0x7f800001)))) << "cut off it would be infinity";
}

TEST(BFloat16Numbers, AreWholeUpTo256) {
  for (int value = 0; value <= 256; ++value) {
    EXPECT_EQ(rounded(static_cast<float>(value)), static_cast<float>(value));
  }
  EXPECT_EQ(rounded(257), 256);
}

class Source : public testing::TestWithParam<Op> {};

TEST_P(Source, IsReadAndStaysAsItIs) {
  InprocWorld world(2);
  std::vector<BFloat16> source[2], data[2];
  RecordingSink sinks[2];
  std::unique_ptr<Transport> transports[2];
  for (int32_t rank = 0; rank < 2; ++rank) {
    for (const float value : {1.0F, 2.0F}) {
      source[rank].push_back(BFloat16(value + 10.0F * static_cast<float>(rank)));
      data[rank].push_back(BFloat16(-1));
    }
    transports[rank] = world.transport(rank, {{data[rank].data(), 4, Element::kBFloat16, source[rank].data()}});
    transports[rank]->open(&sinks[rank]);
  }
  const Range range{0, 4};
  for (const auto& each : transports) {
    each->start({0, GetParam(), 0, &range, 1});
  }
  for (size_t rank = 0; rank < 2; ++rank) {
    ASSERT_EQ(sinks[rank].end_of(0), "");
    const bool is_sum = GetParam() != Op::kAllGather;
    for (size_t i = 0; i < 2; ++i) {
      const auto given = static_cast<float>(i + 1);
      EXPECT_EQ(static_cast<float>(source[rank][i]), given + 10.0F * static_cast<float>(rank));
      if (GetParam() != Op::kReduceScatter || i == rank) {
        EXPECT_EQ(static_cast<float>(data[rank][i]), is_sum ? 2 * given + 10 : given + 10.0F * static_cast<float>(i));
      }
    }
  }
  for (const auto& each : transports) {
    each->close();
  }
}

INSTANTIATE_TEST_SUITE_P(Operations, Source, testing::Values(Op::kAllReduce, Op::kReduceScatter, Op::kAllGather));

}  // namespace
}  // namespace gradcast
