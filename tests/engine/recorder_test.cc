// The record of what happened: the last iterations, never more memory.
#include "engine/recorder.h"

#include <gtest/gtest.h>

#include <algorithm>
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
  for (const int32_t kept : {1, 3}) {
    Recorder recorder(kept);
    EXPECT_TRUE(recorder.timeline().empty());
    std::vector<int64_t> expected;
    for (int64_t iteration = 0; iteration < 8; ++iteration) {
      recorder.begin(iteration, 1, 2, 1);
      expected.push_back(iteration);
      expected.erase(expected.begin(), expected.end() - std::min<int64_t>(kept, iteration + 1));
      EXPECT_EQ(recorder.current().iteration, iteration);
      EXPECT_EQ(iterations_of(recorder), expected);
    }
  }
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

}  // namespace
}  // namespace gradcast
