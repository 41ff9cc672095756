// The record of what happened: the last iterations, never more memory.
#include "engine/recorder.h"

#include <gtest/gtest.h>

#include <vector>

namespace gradcast {
namespace {

std::vector<int64_t> iterations_of(const Recorder& recorder) {
  std::vector<int64_t> iterations;
  for (const IterationRecord& record : recorder.timeline()) {
    iterations.push_back(record.iteration);
  }
  return iterations;
}

TEST(Recorder, KeepsTheLastIterationsOldestFirst) {
  Recorder recorder(3);
  EXPECT_TRUE(recorder.empty());
  EXPECT_TRUE(recorder.timeline().empty());
  for (int64_t iteration = 0; iteration < 2; ++iteration) {
    recorder.begin(iteration, 1, 2, 1);
  }
  EXPECT_EQ(iterations_of(recorder), std::vector<int64_t>({0, 1}));
  for (int64_t iteration = 2; iteration < 8; ++iteration) {
    recorder.begin(iteration, 1, 2, 1);
    EXPECT_EQ(recorder.current().iteration, iteration);
  }
  EXPECT_EQ(iterations_of(recorder), std::vector<int64_t>({5, 6, 7}));
}

TEST(Recorder, OneIterationIsEnough) {
  Recorder recorder(1);
  recorder.begin(0, 1, 1, 1);
  recorder.begin(1, 1, 1, 1);
  EXPECT_EQ(iterations_of(recorder), std::vector<int64_t>({1}));
}

TEST(Recorder, AReusedRecordStartsFromNothingInItsNewShape) {
  Recorder recorder(1);
  recorder.begin(0, 1, 3, 2);
  recorder.current().ready_ns = {1, 2, 3};
  recorder.current().blocks[1].finish_ns = 9;
  recorder.begin(1, 2, 2, 3);
  EXPECT_EQ(recorder.current().plan_version, 2);
  EXPECT_EQ(recorder.current().ready_ns, std::vector<int64_t>({0, 0}));
  ASSERT_EQ(recorder.current().blocks.size(), 3U);
  EXPECT_EQ(recorder.current().blocks[1].finish_ns, 0);
}

TEST(Recorder, ItsMemoryDoesNotGrowOnceItIsFull) {
  Recorder recorder(4);
  for (int64_t iteration = 0; iteration < 4; ++iteration) {
    recorder.begin(iteration, 1, 100, 30);
  }
  const int64_t size_bytes = recorder.size_bytes();
  EXPECT_GE(size_bytes, 4 * (100 * 8 + 30 * 24));
  for (int64_t iteration = 4; iteration < 50; ++iteration) {
    recorder.begin(iteration, 1, 100, 30);
  }
  EXPECT_EQ(recorder.size_bytes(), size_bytes);
}

}  // namespace
}  // namespace gradcast
