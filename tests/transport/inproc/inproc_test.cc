// The in-process transport by itself: what it promises beyond every transport (tests/transport/transport_conformance.py),
// and how it refuses what ranks do not agree on.
#include "gradcast/inproc.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "gradcast/error.h"
#include "tests/support/recording_sink.h"
#include "tests/support/refusals.h"
#include "tests/support/scripted_world.h"

namespace gradcast {
namespace {

constexpr int64_t kHourNs = 3'600'000'000'000;
// The range of every operation here. It outlives them all.
const std::vector<Range> kRange = {{0, 8}};
using Completions = RecordingSink::Completions;

// A rank with one buffer of each kind of element.
struct Rank {
  std::vector<float> floats;
  std::vector<double> doubles;
  RecordingSink sink;
  std::unique_ptr<Transport> transport;

  template <typename World>
  Rank(World& world, int32_t rank, int64_t elements) : floats(elements), doubles(elements) {
    for (int64_t i = 0; i < elements; ++i) {
      floats[i] = static_cast<float>(100 * rank + i);
      doubles[i] = 1000.0 * rank + static_cast<double>(i);
    }
    transport = world.transport(
        rank, {{floats.data(), elements * 4, Element::kFloat32}, {doubles.data(), elements * 8, Element::kFloat64}});
    transport->open(&sink);
  }

  void start(int64_t ticket, const std::vector<Range>& ranges, Op op = Op::kAllReduce, int32_t buffer = 0) {
    transport->start({ticket, op, buffer, ranges.data(), static_cast<int32_t>(ranges.size())});
    EXPECT_FALSE(sink.has(ticket, "began") || sink.has(ticket, "queued")) << "it waits for no device";
  }
};

// Ranks of one world, each of `elements` elements in each of its buffers.
template <typename World>
struct RanksOf {
  World world;
  std::vector<std::unique_ptr<Rank>> ranks;

  explicit RanksOf(int32_t world_size, int64_t elements = 10, const InprocCost& cost = {}) : world(world_size, cost) {
    for (int32_t rank = 0; rank < world_size; ++rank) {
      ranks.push_back(std::make_unique<Rank>(world, rank, elements));
    }
  }
  Rank& operator[](size_t rank) { return *ranks[rank]; }
  void start_all(int64_t ticket, const std::vector<Range>& ranges, Op op = Op::kAllReduce, int32_t buffer = 0) {
    for (auto& rank : ranks) {
      rank->start(ticket, ranges, op, buffer);
    }
  }
};

using Ranks = RanksOf<InprocWorld>;

TEST(Inproc, Float64IsSummedInFloat64) {
  Ranks ranks(2);
  ranks[0].doubles[0] = 1.0;
  ranks[1].doubles[0] = 0x1p-40;
  ranks.start_all(0, kRange, Op::kAllReduce, 1);
  ASSERT_EQ(ranks[1].sink.await(1), Completions({{0, ""}}));
  EXPECT_EQ(ranks[1].doubles[0], 1.0 + 0x1p-40);
}

TEST(Inproc, ReduceScatterGivesEachRankItsPartAndNaNElsewhere) {
  Ranks ranks(3);
  // Seven elements in two ranges: parts of 3, 3 and 1.
  const std::vector<Range> ranges = {{0, 16}, {28, 40}};
  const std::vector<size_t> elements = {0, 1, 2, 3, 7, 8, 9};
  ranks.start_all(0, ranges, Op::kReduceScatter);
  for (size_t rank = 0; rank < 3; ++rank) {
    ASSERT_EQ(ranks[rank].sink.await(1), Completions({{0, ""}}));
    for (size_t at = 0; at < elements.size(); ++at) {
      const float value = ranks[rank].floats[elements[at]];
      if (at / 3 == rank) {
        EXPECT_EQ(value, static_cast<float>(300 + 3 * elements[at]));
      } else {
        EXPECT_TRUE(std::isnan(value));
      }
    }
    EXPECT_EQ(ranks[rank].floats[5], static_cast<float>(100 * rank + 5));
  }
}

TEST(Inproc, OperationsOnOneWireEndInTheOrderOfTheirStart) {
  Ranks ranks(2, 10, {.alpha_ns = 2e5, .beta_ns_per_byte = 1e4});
  const std::vector<std::vector<Range>> ranges = {{{0, 40}}, {{0, 4}}, {{4, 8}}};
  const auto begin = std::chrono::steady_clock::now();
  for (int64_t ticket = 0; ticket < 3; ++ticket) {
    ranks.start_all(ticket, ranges[ticket]);
  }
  for (size_t rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(ranks[rank].sink.await(3), Completions({{0, ""}, {1, ""}, {2, ""}}));
  }
  // One start-up of 200 us, then the wire is busy for 480 us; the start-ups of the later two pass meanwhile.
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::microseconds(680));
}

TEST(Inproc, RanksThatStartDifferentOperationsAreTold) {
  struct Case {
    std::vector<Range> ranges;
    Op op;
    int32_t buffer;
    const char* text;
  };
  const std::vector<Case> cases = {
      {{{0, 8}}, Op::kReduceScatter, 0, "rank 1 reduce_scatter of bytes [0, 8) of buffer 0 (float32)"},
      {{{0, 16}}, Op::kAllReduce, 0, "rank 1 all_reduce of bytes [0, 16) of buffer 0 (float32)"},
      {{{8, 16}}, Op::kAllReduce, 0, "rank 1 all_reduce of bytes [8, 16) of buffer 0 (float32)"},
      {{{0, 4}, {8, 12}}, Op::kAllReduce, 0, "[0, 4), [8, 12) of buffer 0"},
      {{{0, 8}}, Op::kAllReduce, 1, "rank 1 all_reduce of bytes [0, 8) of buffer 1 (float64)"},
  };
  for (const Case& wrong : cases) {
    SCOPED_TRACE(wrong.text);
    Ranks ranks(2);
    ranks.start_all(0, kRange);
    ranks[0].start(1, kRange);
    ranks[1].start(1, wrong.ranges, wrong.op, wrong.buffer);
    for (size_t rank = 0; rank < 2; ++rank) {
      const Completions completions = ranks[rank].sink.await(2);
      ASSERT_EQ(completions.size(), 2U);
      EXPECT_EQ(completions[0].second, "");
      EXPECT_NE(completions[1].second.find("ranks 0 and 1 started different operations as number 1"), std::string::npos)
          << completions[1].second;
      EXPECT_NE(completions[1].second.find(wrong.text), std::string::npos) << completions[1].second;
    }
  }
}

TEST(Inproc, TheSamePlaceWithOtherElementsIsADifference) {
  InprocWorld world(2);
  std::vector<float> floats(4);
  std::vector<double> doubles(2);
  RecordingSink sinks[2];
  const std::unique_ptr<Transport> transports[2] = {world.transport(0, {{floats.data(), 16, Element::kFloat32}}),
                                                    world.transport(1, {{doubles.data(), 16, Element::kFloat64}})};
  const Range range{0, 16};
  for (int32_t rank = 0; rank < 2; ++rank) {
    transports[rank]->open(&sinks[rank]);
    transports[rank]->start({0, Op::kAllReduce, 0, &range, 1});
  }
  const Completions completions = sinks[0].await(1);
  ASSERT_EQ(completions.size(), 1U);
  EXPECT_NE(completions[0].second.find("(float32), rank 1 all_reduce of bytes [0, 16) of buffer 0 (float64)"),
            std::string::npos)
      << completions[0].second;
}

TEST(Inproc, AScriptedFailureReachesItsRankAloneAndTheOthersWaitUntilItLeaves) {
  RanksOf<ScriptedWorld> ranks(3);
  ranks.world.fail(1, 1, "the cable is cut");
  ranks.start_all(0, kRange);
  ranks.start_all(1, kRange);
  Completions of_the_failed = ranks[1].sink.await(2);
  std::sort(of_the_failed.begin(), of_the_failed.end());  // the failure needs no other rank, so it may come first
  EXPECT_EQ(of_the_failed, Completions({{0, ""}, {1, "the cable is cut"}}));
  EXPECT_EQ(ranks[0].sink.await(1), Completions({{0, ""}}));
  ranks[1].transport->abort("it gives up");
  for (const size_t rank : {0, 2}) {
    EXPECT_EQ(ranks[rank].sink.await(2), Completions({{0, ""}, {1, "rank 1 has left: it gives up"}}));
  }
}

TEST(Inproc, AnAbortCompletesWhatIsOnTheWireAndWhatComesLater) {
  Ranks ranks(2, 10, {.alpha_ns = kHourNs, .beta_ns_per_byte = 0});
  ranks.start_all(0, kRange);
  ranks[0].start(1, kRange);
  ranks[0].transport->abort("enough");
  ranks[0].transport->abort("a second reason");
  EXPECT_EQ(ranks[0].sink.await(2), Completions({{0, "enough"}, {1, "enough"}}));
  ranks[0].start(2, kRange);
  EXPECT_EQ(ranks[0].sink.await(3), Completions({{0, "enough"}, {1, "enough"}, {2, "enough"}}));
  EXPECT_EQ(ranks[1].sink.await(1), Completions({{0, "rank 0 has left: enough"}}));
  ranks[0].transport->close();
}

TEST(Inproc, ARankThatHasClosedIsMissed) {
  Ranks ranks(2);
  ranks.start_all(0, kRange);
  EXPECT_EQ(ranks[1].sink.await(1).size(), 1U);
  EXPECT_EQ(ranks[0].sink.await(1).size(), 1U);
  ranks[0].transport->close();
  ranks[1].start(1, kRange);
  EXPECT_EQ(ranks[1].sink.await(2), Completions({{0, ""}, {1, "rank 0 has left: it has closed its transport"}}));
}

TEST(Inproc, ATransportMayGoInTheMiddleOfItsWorkAndAfterItsWorld) {
  auto ranks = std::make_unique<Ranks>(2, 10, InprocCost{kHourNs, 0});
  ranks->start_all(0, kRange);
  std::unique_ptr<Transport> survivor = std::move((*ranks)[1].transport);
  (*ranks)[0].transport.reset();
  EXPECT_EQ((*ranks)[1].sink.await(1), Completions({{0, "rank 0 has left: its transport is gone"}}));
  ranks.reset();
  EXPECT_EQ(survivor->world_size(), 2);
}

TEST(Inproc, RefusesWorldsAndBuffersThatCannotBe) {
  expect_refused([] { InprocWorld(0); }, ErrorCode::kInvalidOption, "world_size is 0");
  expect_refused([] { InprocWorld(1, {.alpha_ns = -1, .beta_ns_per_byte = 0}); }, ErrorCode::kInvalidOption,
                 "alpha_ns");
  expect_refused([] { InprocWorld(1, {.alpha_ns = 0, .beta_ns_per_byte = NAN}); }, ErrorCode::kInvalidOption,
                 "beta_ns_per_byte");
  InprocWorld world(2);
  std::vector<float> floats(4);
  expect_refused([&] { world.transport(2, {}); }, ErrorCode::kInvalidOption, "rank 2 does not exist");
  expect_refused([&] { world.transport(-1, {}); }, ErrorCode::kInvalidOption, "rank -1");
  expect_refused(
      [&] {
        world.transport(0, {{floats.data(), 15, Element::kFloat32}});
      },
      ErrorCode::kInvalidOption, "cuts an element");
  const auto transport = world.transport(0, {{floats.data(), 16, Element::kFloat32}});
  expect_refused([&] { world.transport(0, {}); }, ErrorCode::kInvalidOption, "rank 0 has its transport already");
}

}  // namespace
}  // namespace gradcast
