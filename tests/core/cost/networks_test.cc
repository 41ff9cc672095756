// Derived and published link models, against numbers worked out by hand.
#include "gradcast/networks.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <set>
#include <string>

#include "tests/support/refusals.h"

namespace gradcast {
namespace {

// 50 us and 10 Gbit/s: 0.8 ns per byte.
constexpr Hop kHop{50e3, 1.25e9};

const LinkPiece& line_of(const OpCost& cost) {
  EXPECT_TRUE(cost.linear());
  return cost.pieces.front();
}

void expect_line(const OpCost& cost, double alpha_ns, double beta_ns_per_byte) {
  EXPECT_NEAR(line_of(cost).alpha_ns, alpha_ns, 1e-9 * (1 + alpha_ns));
  EXPECT_NEAR(line_of(cost).beta_ns_per_byte, beta_ns_per_byte, 1e-12);
}

TEST(RingLink, ByHand) {
  // 8 workers: 14 steps of 50 us, and 14/8 of the bytes at 0.8 ns.
  const LinkModel eight = ring_link(kHop, 8);
  expect_line(eight.all_reduce, 700e3, 1.4);
  expect_line(eight.reduce_scatter, 350e3, 0.7);
  expect_line(eight.all_gather, 350e3, 0.7);
  expect_line(ring_link(kHop, 64).all_reduce, 6.3e6, 1.575);
}

TEST(TreeLink, ByHand) {
  // 8 workers: 3 steps down, 3 up.
  expect_line(tree_link(kHop, 8).all_reduce, 300e3, 1.4);
  expect_line(tree_link(kHop, 8).reduce_scatter, 150e3, 0.7);
  // 5 workers need as many steps as 8, 9 need one more.
  expect_line(tree_link(kHop, 5).all_reduce, 300e3, 1.28);
  expect_line(tree_link(kHop, 9).all_reduce, 400e3, 0.8 * 16 / 9);
  // Two workers are a ring and a tree at once.
  EXPECT_EQ(tree_link(kHop, 2), ring_link(kHop, 2));
  // One worker costs nothing.
  for (const LinkModel& link : {ring_link(kHop, 1), tree_link(kHop, 1), hierarchical_link({kHop, kHop, 1, 1})}) {
    expect_line(link.all_reduce, 0, 0);
  }
}

TEST(HierarchicalLink, ByHandAndARingAtItsLimits) {
  // 4 nodes of 8 GPUs: 5 us and 100 GB/s (0.01 ns per byte) inside, 50 us and 10 Gbit/s between.
  // alpha 2 * 7 * 5 us + 2 * 3 * 50 us, beta 14/8 * 0.01 + 6/4 * 0.8.
  const Hop inside{5e3, 100e9};
  const LinkModel link = hierarchical_link({inside, kHop, 4, 8});
  expect_line(link.all_reduce, 370e3, 1.2175);
  expect_line(link.reduce_scatter, 185e3, 0.60875);
  expect_line(link.all_gather, 185e3, 0.60875);
  EXPECT_EQ(hierarchical_link({inside, kHop, 16, 1}), ring_link(kHop, 16));
  EXPECT_EQ(hierarchical_link({inside, kHop, 1, 8}), ring_link(inside, 8));
}

TEST(DerivedLink, RefusesWhatIsNoNetwork) {
  const auto refused = [](const std::function<void()>& call, const std::string& text) {
    expect_refused(call, ErrorCode::kInvalidOption, text);
  };
  refused(
      [] {
        ring_link({50e3, 0}, 8);
      },
      "the bandwidth of the link is 0 bytes per second; it must be from 1 to 1e18");
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const double wrong : {-1.0, nan, std::numeric_limits<double>::infinity()}) {
    refused([=] { tree_link({50e3, wrong}, 8); }, "bandwidth");
    refused([=] { ring_link({wrong, 1e9}, 8); }, "latency");
  }
  refused([] { ring_link(kHop, 0); }, "the number of workers is 0; it must be at least 1");
  refused([] { hierarchical_link({kHop, kHop, 0, 8}); }, "nodes");
  refused([] { hierarchical_link({kHop, kHop, 4, -1}); }, "workers per node");
  refused([] { hierarchical_link({{0, 0}, kHop, 4, 2}); }, "inside a node");
  refused([] { hierarchical_link({kHop, {0, 0}, 4, 2}); }, "between nodes");
  for (const NamedNetwork& known : networks()) {
    refused([] { network("10gbe"); }, known.name);
  }
}

TEST(Networks, EveryOneIsValidAndNamedForItsSize) {
  std::set<std::string> names;
  for (const NamedNetwork& network : networks()) {
    EXPECT_TRUE(names.insert(network.name).second) << network.name;
    EXPECT_NO_THROW(check_link(network.link)) << network.name;
    EXPECT_TRUE(network.name.ends_with("-" + std::to_string(network.world_size))) << network.name;
    EXPECT_FALSE(network.summary.empty()) << network.name;
    EXPECT_FALSE(network.source.empty()) << network.name;
    // Only all-reduces were published.
    EXPECT_FALSE(network.link.reduce_scatter.available()) << network.name;
    EXPECT_FALSE(network.link.all_gather.available()) << network.name;
    // Not a slip of units: 100 MB take between half a millisecond and 100 ms on each of them.
    EXPECT_GT(network.link.all_reduce.cost_ns(100'000'000), 5e5) << network.name;
    EXPECT_LT(network.link.all_reduce.cost_ns(100'000'000), 1e8) << network.name;
  }
  EXPECT_EQ(names.size(), 16u);
}

TEST(Networks, ByName) {
  const NamedNetwork& ethernet = network("10gbe-8");
  EXPECT_EQ(ethernet.world_size, 8);
  expect_line(ethernet.link.all_reduce, 523e3, 0.8571);
  expect_line(network("56gbib-64").link.all_reduce, 806.3e3, 0.58878);
  expect_line(network("pcie-4").link.all_reduce, 42.04e3, 0.2059);
  expect_line(network("nvlink-a100-8").link.all_reduce, 73.5e3, 0.007899);
}

}  // namespace
}  // namespace gradcast
