// The transport over NCCL: sums, order, and every way in which it can go wrong. Built twice: on a device of the tests'
// own with ranks in threads, and, as nccl_device_test, on a real one with a single rank, where it skips without a
// device.
#include "gradcast/nccl.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "gradcast/error.h"
#include "tests/support/recording_sink.h"
#ifdef GRADCAST_FAKE_DEVICE
#include "tests/transport/nccl/fake_device.h"
#else
#include <cuda_runtime_api.h>
#endif

namespace gradcast {
namespace {

using namespace std::chrono_literals;
constexpr int64_t kElements = 1000;

#ifdef GRADCAST_FAKE_DEVICE
constexpr std::array kWorlds{1, 2, 4};
#else
constexpr std::array kWorlds{1};
#endif

// One rank: its gradients on the device, and a stream on which it copies them.
class Rank {
 public:
  Rank(const std::string& id, int32_t rank, int32_t world_size, NcclOptions options = {})
      : rank_(rank), memory_(allocate_for_nccl(kElements * 4)) {
    options.device = rank;
    cudaSetDevice(rank);
    EXPECT_EQ(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, 0), cudaSuccess);
    write(std::vector<float>(kElements, 0.0F));
    transport_ =
        make_nccl_transport(id, rank, world_size, {{memory_.get(), kElements * 4, Element::kFloat32}}, options);
    transport_->open(&sink_);
  }
  ~Rank() {
    transport_->abort("the test has ended");
    transport_->close();
    cudaStreamDestroy(stream_);
  }

  // The value of element i on this rank.
  float value(int64_t i) const { return static_cast<float>(i + 1000 * rank_); }

  void write_all() {
    std::vector<float> values(kElements);
    for (int64_t i = 0; i < kElements; ++i)
      values[static_cast<size_t>(i)] = value(i);
    write(values);
  }
  void start(int64_t ticket, const std::vector<Range>& elements, Op op = Op::kAllReduce) {
    std::vector<Range> ranges;
    for (const Range& each : elements)
      ranges.push_back({each.lo_bytes * 4, each.hi_bytes * 4});
    transport_->start({ticket, op, 0, ranges.data(), static_cast<int32_t>(ranges.size())});
  }
  std::vector<float> read() const {
    std::vector<float> values(kElements);
    cudaMemcpyAsync(values.data(), memory_.get(), kElements * 4, cudaMemcpyDeviceToHost, stream_);
    cudaStreamSynchronize(stream_);
    return values;
  }

  RecordingSink& sink() { return sink_; }
  Transport& transport() { return *transport_; }

 private:
  void write(const std::vector<float>& values) {
    cudaMemcpyAsync(memory_.get(), values.data(), kElements * 4, cudaMemcpyHostToDevice, stream_);
    cudaStreamSynchronize(stream_);
  }

  const int32_t rank_;
  const std::shared_ptr<void> memory_;
  cudaStream_t stream_ = nullptr;
  RecordingSink sink_;
  std::unique_ptr<Transport> transport_;
};

// Each rank on a thread of its own.
template <typename Action>
void on_ranks(int32_t world_size, const Action& action, NcclOptions options = {}) {
  const std::string id = new_nccl_id();
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        Rank each(id, rank, world_size, options);
        action(each, rank);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (std::thread& each : threads)
    each.join();
}

float sum_at(int64_t i, int32_t world_size) {
  return static_cast<float>(i * world_size + 1000 * (world_size * (world_size - 1) / 2));
}

// The rank holds sums in these elements, and its own values in the others.
void expect_sums(const Rank& rank, const std::vector<Range>& elements, int32_t world_size) {
  const std::vector<float> found = rank.read();
  for (int64_t i = 0; i < kElements; ++i) {
    const bool is_summed =
        std::ranges::any_of(elements, [&](const Range& each) { return each.lo_bytes <= i && i < each.hi_bytes; });
    ASSERT_EQ(found[static_cast<size_t>(i)], is_summed ? sum_at(i, world_size) : rank.value(i)) << i;
  }
}

// Nothing that the tests' own device has given is still in use.
void expect_nothing_left() {
#ifdef GRADCAST_FAKE_DEVICE
  fake::end_streams();
  fake::set_version(22900);
  EXPECT_EQ(fake::communicators(), 0);
  EXPECT_EQ(fake::allocations(), 0);
#endif
}

class Nccl : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
#ifndef GRADCAST_FAKE_DEVICE
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) GTEST_SKIP() << "there is no CUDA device here";
#endif
  }
  void TearDown() override {
    expect_nothing_left();
  }
};

TEST_P(Nccl, SumsRangesWhereTheyLie) {
  const std::vector<Range> some{{0, 100}, {200, 201}, {700, 1000}};
  on_ranks(GetParam(), [&](Rank& rank, int32_t) {
    rank.write_all();
    rank.start(0, some);
    ASSERT_EQ(rank.sink().end_of(0), "");
    expect_sums(rank, some, GetParam());
  });
}

TEST_P(Nccl, HalvesTogetherAreASum) {
  // The first falls into parts of one length where it lies, the others do not.
  const std::vector<std::vector<Range>> blocks{{{0, 400}}, {{400, 401}}, {{401, 420}, {600, 733}}};
  on_ranks(GetParam(), [&](Rank& rank, int32_t number) {
    rank.write_all();
    int64_t ticket = 0;
    for (const auto& elements : blocks) {
      rank.start(ticket, elements, Op::kReduceScatter);
      ASSERT_EQ(rank.sink().end_of(ticket++), "");
      // Only this rank's part is a sum by now.
      std::vector<int64_t> places;
      for (const Range& each : elements) {
        for (int64_t i = each.lo_bytes; i < each.hi_bytes; ++i)
          places.push_back(i);
      }
      const auto part = (static_cast<int64_t>(places.size()) + GetParam() - 1) / GetParam();
      const std::vector<float> half = rank.read();
      for (int64_t at = part * number; at < std::min<int64_t>(part * (number + 1), static_cast<int64_t>(places.size()));
           ++at) {
        const int64_t i = places[static_cast<size_t>(at)];
        ASSERT_EQ(half[static_cast<size_t>(i)], sum_at(i, GetParam())) << i;
      }
      rank.start(ticket, elements, Op::kAllGather);
      ASSERT_EQ(rank.sink().end_of(ticket++), "");
    }
    expect_sums(rank, {{0, 420}, {600, 733}}, GetParam());
  });
}

TEST_P(Nccl, ManyOperationsEndInTheirOrder) {
  on_ranks(GetParam(), [&](Rank& rank, int32_t) {
    for (int64_t step = 0; step < 20; ++step) {
      rank.write_all();
      for (int64_t block = 0; block < 10; ++block)
        rank.start(10 * step + block, {{100 * block, 100 * block + 100}});
      for (int64_t block = 0; block < 10; ++block)
        ASSERT_EQ(rank.sink().end_of(10 * step + block), "");
      expect_sums(rank, {{0, kElements}}, GetParam());
    }
  });
}

TEST_P(Nccl, RefusesBytesThatDoNotExist) {
  on_ranks(GetParam(), [&](Rank& rank, int32_t) {
    rank.start(0, {{0, kElements + 1}});
    EXPECT_NE(rank.sink().end_of(0).find("are not ascending whole elements of a buffer of 4000 bytes"),
              std::string::npos);
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, Nccl, testing::ValuesIn(kWorlds));

#ifdef GRADCAST_FAKE_DEVICE

class NcclFake : public testing::Test {
 protected:
  void TearDown() override { expect_nothing_left(); }
};

// The message of the error that connecting ends with.
std::string refusal(const std::string& id, int32_t rank, int32_t world_size, const NcclOptions& options) {
  try {
    make_nccl_transport(id, rank, world_size, {}, options);
  } catch (const Error& error) {
    return error.what();
  }
  return "none";
}

TEST_F(NcclFake, MemoryForMessagesIsKept) {
  on_ranks(1, [](Rank& rank, int32_t) {
    rank.start(0, {{0, 100}, {200, 300}}, Op::kReduceScatter);
    ASSERT_EQ(rank.sink().end_of(0), "");
    const int before = fake::allocations_ever();
    for (int64_t ticket = 1; ticket < 5; ++ticket) {
      rank.start(ticket, {{0, 50}, {200, 250}}, Op::kAllGather);
      ASSERT_EQ(rank.sink().end_of(ticket), "");
    }
    EXPECT_EQ(fake::allocations_ever(), before);
  });
}

// Rank 0 goes on alone: rank 1, which is connected with it, comes to no other operation and ends when it is done.
template <typename Action>
void on_rank_0_alone(const Action& action, NcclOptions options = {}) {
  fake::Place done;
  on_ranks(
      2,
      [&](Rank& rank, int32_t number) {
        rank.start(0, {{0, 10}});
        EXPECT_EQ(rank.sink().end_of(0), "");
        if (number == 0) {
          action(rank);
          done.reach();
        } else {
          done.wait();
          rank.transport().close();
        }
      },
      options);
}

const NcclOptions kImpatient{.operation_timeout_ns = 200'000'000};

TEST_F(NcclFake, ARankThatNeverComesIsGivenUpAfterTheTimeout) {
  on_rank_0_alone(
      [](Rank& rank) {
        rank.start(1, {{0, 10}});
        const std::string end = rank.sink().end_of(1);
        EXPECT_NE(end.find("another rank has stopped"), std::string::npos) << end;
        rank.start(2, {{0, 10}});
        EXPECT_EQ(rank.sink().end_of(2), end);
      },
      kImpatient);
}

TEST_F(NcclFake, ARankThatDoesNotComeToTheFirstOperationFailsWhatCameBefore) {
  fake::Place given_up;
  on_ranks(
      2,
      [&](Rank& rank, int32_t number) {
        if (number == 1) {
          given_up.wait();
          return;
        }
        rank.start(0, {{0, 10}});
        rank.start(1, {{10, 20}});
        const std::string end = rank.sink().end_of(0);
        EXPECT_TRUE(
            end.starts_with("all_reduce of 40 bytes failed on rank 0 of 2 (NCCL): NCCL could not start a "
                            "block in time: not every rank has come"))
            << end;
        EXPECT_EQ(rank.sink().end_of(1), end);
        given_up.reach();
      },
      kImpatient);
}

TEST_F(NcclFake, AnAbortEndsEverythingAtOnce) {
  const int aborts = fake::aborts();
  on_rank_0_alone([](Rank& rank) {
    rank.start(1, {{0, 10}});
    rank.start(2, {{10, 20}});
    ASSERT_TRUE(rank.sink().becomes(2, "queued"));
    rank.transport().abort("enough");
    EXPECT_EQ(rank.sink().end_of(1), "enough");
    EXPECT_EQ(rank.sink().end_of(2), "enough");
  });
  EXPECT_EQ(fake::aborts(), aborts + 2) << "the other rank cannot end well either";
}

TEST_F(NcclFake, ALostConnectionIsNamed) {
  on_rank_0_alone([](Rank& rank) {
    rank.start(1, {{0, 10}});
    ASSERT_TRUE(rank.sink().becomes(1, "queued"));
    fake::break_connections(0);
    const std::string end = rank.sink().end_of(1);
    EXPECT_NE(end.find("all_reduce of 40 bytes failed on rank 0 of 2 (NCCL): remote process exited"), std::string::npos)
        << end;
  });
}

TEST_F(NcclFake, ALostConnectionIsReportedForTheFirstOperationFirst) {
  on_rank_0_alone([](Rank& rank) {
    for (int64_t ticket = 1; ticket <= 3; ++ticket)
      rank.start(ticket, {{10 * ticket, 10 * ticket + 10}});
    ASSERT_TRUE(rank.sink().becomes(3, "queued"));
    fake::break_connections(0);
    std::vector<int64_t> order;
    for (const auto& [ticket, error] : rank.sink().await(4))
      order.push_back(ticket);
    EXPECT_EQ(order, (std::vector<int64_t>{0, 1, 2, 3}));
  });
}

TEST_F(NcclFake, RanksThatEndTogetherEndWell) {
  const auto before = std::tuple(fake::aborts(), fake::destructions());
  const std::string id = new_nccl_id();
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      RecordingSink sink;
      NcclOptions options;
      options.device = rank;
      const auto transport = make_nccl_transport(id, rank, 2, {}, options);
      transport->open(&sink);
      transport->close();
      transport->close();
    });
  }
  for (std::thread& each : threads)
    each.join();
  EXPECT_EQ(std::tuple(fake::aborts(), fake::destructions()), std::tuple(std::get<0>(before), std::get<1>(before) + 2));
}

TEST_F(NcclFake, NoMemoryForAMessageFailsThatOperationAlone) {
  on_ranks(1, [](Rank& rank, int32_t) {
    fake::refuse_memory(1);
    rank.start(0, {{0, 100}, {200, 301}}, Op::kReduceScatter);
    const std::string end = rank.sink().end_of(0);
    EXPECT_NE(end.find("the device has no memory left to hold a block on its way; give a smaller batch"),
              std::string::npos)
        << end;
    rank.start(1, {{0, 100}, {200, 301}}, Op::kReduceScatter);
    EXPECT_EQ(rank.sink().end_of(1), "");
  });
}

TEST_F(NcclFake, WhatCannotConnectSaysWhatToDo) {
  NcclOptions quick;
  quick.connect_timeout_ns = 100'000'000;
  const std::string id = new_nccl_id();
  EXPECT_EQ(refusal(id, 0, 2, quick),
            "NCCL could not connect rank 0 of 2 in time: not every rank has come; NCCL_DEBUG=INFO shows which have");
  EXPECT_EQ(refusal("not an id", 0, 1, quick), "the id is not what new_nccl_id() has returned on one of the ranks");
  NcclOptions nowhere;
  nowhere.device = 8;
  EXPECT_EQ(refusal(id, 0, 1, nowhere),
            "there is no CUDA device 8 here, of 8; train on the CPU with Gloo or MPI instead");
}

TEST_F(NcclFake, TwoRanksOnOneDevice) {
  NcclOptions quick;
  quick.connect_timeout_ns = 300'000'000;
  for (const int version : {22900, 23000}) {  // each has words of its own
    fake::set_version(version);
    const std::string id = new_nccl_id();
    std::thread other([&] { refusal(id, 0, 2, quick); });
    std::this_thread::sleep_for(50ms);
    const std::string second = refusal(id, 1, 2, quick);
    other.join();
    EXPECT_NE(second.find("two ranks use the same device, which NCCL refuses; start one rank per device"),
              std::string::npos)
        << second;
  }
}

TEST_F(NcclFake, RanksWithAnotherNccl) {
  const std::string id = new_nccl_id();
  fake::set_version(22805);
  EXPECT_EQ(refusal(id, 1, 2, {}),
            "rank 1 has NCCL 2.28.5, the rank that made the id 2.29.0; install the same on all hosts");
}

TEST_F(NcclFake, MemoryThatNcclCannotGiveIsOrdinaryMemoryOfTheDevice) {
  fake::refuse_memory(1);
  EXPECT_NE(allocate_for_nccl(100), nullptr);
  fake::refuse_memory(2);
  EXPECT_THROW(allocate_for_nccl(100), Error);
}

#endif

}  // namespace
}  // namespace gradcast
