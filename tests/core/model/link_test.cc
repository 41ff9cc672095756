// The link model: costs, their inverse, lines below them, and what a link is refused for.
#include "gradcast/link.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>

#include "tests/support/refusals.h"

namespace gradcast {
namespace {

// An eager protocol up to 1000 bytes, then one with a larger start-up and a better rate: 1000 ns + 4 ns per byte is
// 5000 at 1000 bytes, 4500 + 1 * 1001 is 5501 above.
OpCost two_pieces() {
  return {{{1000, 1000, 4}, {kUnboundedBytes, 4500, 1}}};
}

LinkModel link_of(OpCost all_reduce) {
  LinkModel link;
  link.all_reduce = std::move(all_reduce);
  return link;
}

// A random cost that never falls: sizes up to some hundreds, so that every size can be tried.
OpCost random_cost(std::mt19937_64& random) {
  const auto uniform = [&random](double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(random);
  };
  const int piece_count = std::uniform_int_distribution<int>(1, 5)(random);
  OpCost cost;
  int64_t end_bytes = 0;
  double level_ns = 0;
  for (int i = 0; i < piece_count; ++i) {
    // A rate of 0 and an alpha of 0 are the corner cases of the formulas; each appears in a fifth of the pieces.
    double beta = uniform(0, 1) < 0.2 ? 0 : std::pow(10, uniform(-2, 2));
    double alpha_ns = uniform(0, 1) < 0.2 ? 0 : std::pow(10, uniform(-1, 3));
    const double fall_ns = level_ns - (alpha_ns + beta * static_cast<double>(end_bytes + 1));
    if (fall_ns > 0) alpha_ns += fall_ns;
    end_bytes += std::uniform_int_distribution<int64_t>(1, 200)(random);
    cost.pieces.push_back({i + 1 == piece_count ? kUnboundedBytes : end_bytes, alpha_ns, beta});
    level_ns = alpha_ns + beta * static_cast<double>(end_bytes);
  }
  return cost;
}

TEST(OpCost, FirstPieceThatHoldsTheSizeApplies) {
  const OpCost cost = two_pieces();
  EXPECT_DOUBLE_EQ(cost.cost_ns(1), 1004);
  EXPECT_DOUBLE_EQ(cost.cost_ns(1000), 5000);
  EXPECT_DOUBLE_EQ(cost.cost_ns(1001), 5501);
  EXPECT_DOUBLE_EQ(cost.cost_ns(kBytesMax), 4500 + std::ldexp(1, 53));
  EXPECT_DOUBLE_EQ(cost.alpha_ns_min(), 1000);
  EXPECT_DOUBLE_EQ(cost.beta_ns_per_byte_min(), 1);
  EXPECT_FALSE(cost.linear());
  EXPECT_FALSE(OpCost{}.available());
  EXPECT_THROW(OpCost{}.cost_ns(1), Error);
}

TEST(OpCost, CapacityByHand) {
  const OpCost cost = two_pieces();
  EXPECT_EQ(cost.capacity_bytes(1003.9), 0);
  EXPECT_EQ(cost.capacity_bytes(1004), 1);
  EXPECT_EQ(cost.capacity_bytes(4999), 999);
  EXPECT_EQ(cost.capacity_bytes(5000), 1000);
  EXPECT_EQ(cost.capacity_bytes(5500), 1000);  // in the jump
  EXPECT_EQ(cost.capacity_bytes(5501), 1001);
  EXPECT_EQ(cost.capacity_bytes(-1), 0);
  EXPECT_EQ(cost.capacity_bytes(std::numeric_limits<double>::quiet_NaN()), 0);
  EXPECT_EQ(cost.capacity_bytes(std::numeric_limits<double>::infinity()), kBytesMax);
}

// The definition, on costs where rounding bites: huge alphas beside tiny rates, sizes near 2^53.
TEST(OpCost, CapacityIsTheLargestSizeThatFits) {
  for (uint64_t seed = 0; seed < 20'000; ++seed) {
    std::mt19937_64 random(seed);
    OpCost cost = random_cost(random);
    const double alpha_factor = std::pow(10, std::uniform_real_distribution<double>(-3, 12)(random));
    const double beta_factor = std::pow(10, std::uniform_real_distribution<double>(-9, 6)(random));
    cost = scaled(link_of(cost), alpha_factor, beta_factor).all_reduce;
    const int64_t target_bytes = static_cast<int64_t>(std::exp2(std::uniform_real_distribution<double>(0, 53)(random)));
    for (double factor : {1.0, 1 - 1e-15, 1 + 1e-15, 1.5}) {
      const double duration_ns = cost.cost_ns(target_bytes) * factor;
      const int64_t capacity_bytes = cost.capacity_bytes(duration_ns);
      ASSERT_TRUE(factor < 1 || capacity_bytes >= target_bytes) << "seed " << seed;
      ASSERT_TRUE(capacity_bytes == 0 || cost.cost_ns(capacity_bytes) <= duration_ns) << "seed " << seed;
      ASSERT_TRUE(capacity_bytes == kBytesMax || cost.cost_ns(capacity_bytes + 1) > duration_ns) << "seed " << seed;
    }
  }
}

TEST(Minorants, OnePieceIsItsOwn) {
  const OpCost line{{{kUnboundedBytes, 1.1e6, 0.31}}};
  const auto lines = minorants(line, 1 << 20);
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_EQ(lines[0].alpha_ns, 1.1e6);
  EXPECT_EQ(lines[0].beta_ns_per_byte, 0.31);
  // So it is when no size reaches the second piece.
  EXPECT_EQ(minorants(two_pieces(), 1000).size(), 1u);
  EXPECT_EQ(minorants(two_pieces(), 1000)[0].beta_ns_per_byte, 4);
}

// A bend upwards has both its lines and their mean: 100 + x up to 50 bytes, 50 + 2 x above, equal at 50.
TEST(Minorants, ConvexCostByHand) {
  const auto lines = minorants({{{50, 100, 1}, {kUnboundedBytes, 50, 2}}}, 1000);
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_NEAR(lines.front().alpha_ns, 100, 1e-9);
  EXPECT_NEAR(lines.front().beta_ns_per_byte, 1, 1e-9);
  EXPECT_NEAR(lines[1].alpha_ns, 75, 1e-9);
  EXPECT_NEAR(lines[1].beta_ns_per_byte, 1.5, 1e-9);
  EXPECT_NEAR(lines.back().alpha_ns, 50, 1e-9);
  EXPECT_NEAR(lines.back().beta_ns_per_byte, 2, 1e-9);
}

// Where the hull's lines begin below 0, the line through the origin takes their place: 10 up to 10 bytes, then a jump
// to 100 + 10 x; the smallest cost per byte is 10 ns / 10 bytes.
TEST(Minorants, AlphaIsNeverNegative) {
  const auto lines = minorants({{{10, 10, 0}, {kUnboundedBytes, 100, 10}}}, 1000);
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_NEAR(lines.front().alpha_ns, 10, 1e-9);
  EXPECT_EQ(lines.front().beta_ns_per_byte, 0);
  EXPECT_EQ(lines.back().alpha_ns, 0);
  EXPECT_NEAR(lines.back().beta_ns_per_byte, 1, 1e-12);
}

// Below the cost at every size, and not for nothing: at the corners of the hull one of the lines touches it.
TEST(Minorants, AreBelowTheCostEverywhereAndTouchIt) {
  for (uint64_t seed = 0; seed < 5'000; ++seed) {
    std::mt19937_64 random(seed);
    const OpCost cost = random_cost(random);
    const int64_t size_bytes_max = std::uniform_int_distribution<int64_t>(1, 600)(random);
    const auto lines = minorants(cost, size_bytes_max);
    ASSERT_FALSE(lines.empty()) << "seed " << seed;
    double slack_min = std::numeric_limits<double>::infinity();
    for (int64_t size_bytes = 1; size_bytes <= size_bytes_max; ++size_bytes) {
      const double cost_ns = cost.cost_ns(size_bytes);
      for (const LinkLine& line : lines) {
        const double line_ns = line.alpha_ns + line.beta_ns_per_byte * static_cast<double>(size_bytes);
        ASSERT_LE(line_ns, cost_ns) << "seed " << seed << " at " << size_bytes;
        ASSERT_GE(line.alpha_ns, 0) << "seed " << seed;
        ASSERT_GE(line.beta_ns_per_byte, 0) << "seed " << seed;
        slack_min = std::min(slack_min, cost_ns - line_ns);
      }
    }
    ASSERT_LE(slack_min, 1e-9 * cost.cost_ns(size_bytes_max)) << "seed " << seed;
  }
}

// With real sizes the rounding of large numbers must not lift a line above the cost.
TEST(Minorants, StayBelowAtRealSizes) {
  for (uint64_t seed = 0; seed < 2'000; ++seed) {
    std::mt19937_64 random(seed);
    OpCost cost = random_cost(random);
    for (LinkPiece& piece : cost.pieces) {
      if (piece.up_to_bytes != kUnboundedBytes) piece.up_to_bytes *= 1'000'003;
    }
    cost = scaled(link_of(cost), 1e6, 1).all_reduce;  // also raises what falls by the longer pieces
    const auto lines = minorants(cost, int64_t{1} << 40);
    std::uniform_real_distribution<double> exponent(0, 40);
    for (int i = 0; i < 200; ++i) {
      const int64_t size_bytes = static_cast<int64_t>(std::exp2(exponent(random)));
      for (const LinkLine& line : lines) {
        ASSERT_LE(line.alpha_ns + line.beta_ns_per_byte * static_cast<double>(size_bytes), cost.cost_ns(size_bytes))
            << "seed " << seed << " at " << size_bytes;
      }
    }
  }
}

TEST(CheckLink, NamesTheFirstWrongField) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  struct Case {
    OpCost cost;
    std::string field;
  };
  const Case cases[] = {
      {{}, "link.all_reduce is missing"},
      {{{{kUnboundedBytes, -1, 0}}}, "link.all_reduce[0].alpha_ns is -1;"},
      {{{{kUnboundedBytes, nan, 0}}}, "link.all_reduce[0].alpha_ns is not a number;"},
      {{{{kUnboundedBytes, 0, infinity}}}, "link.all_reduce[0].beta_ns_per_byte is inf;"},
      {{{{kUnboundedBytes, 1e16, 0}}}, "link.all_reduce[0].alpha_ns is 1e+16;"},
      {{{{100, 1, 0}}}, "link.all_reduce[0].up_to_bytes is 100; the last piece has no end"},
      {{{{kUnboundedBytes, 1, 0}, {kUnboundedBytes, 1, 0}}}, "link.all_reduce[0].up_to_bytes is missing;"},
      {{{{0, 1, 0}, {kUnboundedBytes, 1, 0}}}, "link.all_reduce[0].up_to_bytes is 0;"},
      {{{{100, 1, 0}, {100, 2, 0}, {kUnboundedBytes, 3, 0}}}, "link.all_reduce[1].up_to_bytes is 100;"},
      {{{{kBytesMax + 1, 1, 0}, {kUnboundedBytes, 3, 0}}}, "link.all_reduce[0].up_to_bytes is 9007199254740993;"},
      {{{{100, 50, 0}, {kUnboundedBytes, 20, 0}}},
       "link.all_reduce[1].alpha_ns is 20, so the cost falls from 50 ns at 100 bytes to 20 ns one byte above"},
  };
  for (const Case& c : cases) {
    expect_refused([&] { check_link(link_of(c.cost)); }, ErrorCode::kInvalidLink, c.field);
  }
  EXPECT_NO_THROW(check_link(link_of({{{kUnboundedBytes, 0, 0}}})));
  OpCost many;
  for (int64_t i = 1; i <= 1000; ++i)
    many.pieces.push_back({i, static_cast<double>(i), 0});
  many.pieces.push_back({kUnboundedBytes, 1001, 0});
  expect_refused([&] { check_link(link_of(many)); }, ErrorCode::kInvalidLink,
                 "link.all_reduce has 1001 pieces; at most");
  LinkModel link = link_of(two_pieces());
  EXPECT_NO_THROW(check_link(link));
  link.all_gather = {{{kUnboundedBytes, 5, -2}}};
  expect_refused([&] { check_link(link); }, ErrorCode::kInvalidLink, "link.all_gather[0].beta_ns_per_byte is -2");
  link.all_gather = {};
  link.pack_ns_per_byte = -1;
  expect_refused([&] { check_link(link); }, ErrorCode::kInvalidLink, "link.pack_ns_per_byte is -1");
}

TEST(Scaled, MultipliesEveryCost) {
  LinkModel link = link_of(two_pieces());
  link.all_gather = {{{kUnboundedBytes, 6, 7}}};
  link.pack_ns_per_byte = 0.5;
  link.extra_json = "{\"note\":1}";
  const LinkModel result = scaled(link, 2, 3);
  EXPECT_EQ(result.all_reduce.pieces[0], (LinkPiece{1000, 2000, 12}));
  EXPECT_EQ(result.all_gather.pieces[0], (LinkPiece{kUnboundedBytes, 12, 21}));
  EXPECT_FALSE(result.reduce_scatter.available());
  EXPECT_EQ(result.pack_ns_per_byte, 1.5);
  EXPECT_EQ(result.extra_json, link.extra_json);
  EXPECT_EQ(scaled(link, 1, 1), link);
}

// Cheaper start-ups and more expensive bytes would make a cost fall where a larger alpha buys a better rate.
TEST(Scaled, NeverMakesACostFall) {
  int raised_count = 0;
  for (uint64_t seed = 0; seed < 1'000; ++seed) {
    std::mt19937_64 random(seed);
    const LinkModel link = link_of(random_cost(random));
    EXPECT_NO_THROW(check_link(link)) << "seed " << seed;
    const LinkModel result = scaled(link, 0.5, 2);
    EXPECT_NO_THROW(check_link(result)) << "seed " << seed;
    for (size_t i = 0; i < link.all_reduce.pieces.size(); ++i) {
      const double scaled_ns = link.all_reduce.pieces[i].alpha_ns / 2;
      EXPECT_GE(result.all_reduce.pieces[i].alpha_ns, scaled_ns) << "seed " << seed;
      raised_count += result.all_reduce.pieces[i].alpha_ns > scaled_ns;
    }
  }
  EXPECT_GT(raised_count, 0);
}

}  // namespace
}  // namespace gradcast
