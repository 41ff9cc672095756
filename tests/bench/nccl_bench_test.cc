// gradcast-bench over NCCL, whole, with one rank on a device of the tests' own; MPI is real. MPI starts once in a
// process, so one run serves all tests.
#include <gtest/gtest.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "bench/run.h"
#include "cuda/spin.h"
#include "tests/transport/nccl/fake_device.h"

namespace gradcast {

cudaError_t spin(int64_t duration_ns, cudaStream_t stream) {
  fake::put(stream, [duration_ns] { std::this_thread::sleep_for(std::chrono::nanoseconds(duration_ns)); });
  return cudaSuccess;
}

namespace {

class NcclBench : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    std::vector<std::string> words = {
        "gradcast-bench", "--transport", "nccl",         "--json", "--sweep",       "--schedule", "--bytes-max", "64k",
        "--factor",       "4",           "--iterations", "4",      "--steps",       "1",          "--rounds",    "1",
        "--compute-ms",   "1",           "--scale-size", "0.001",  "--out-of-place"};
    std::vector<char*> argv;
    for (std::string& word : words) {
      argv.push_back(word.data());
    }
    argv.push_back(nullptr);
    testing::internal::CaptureStdout();
    exit_code_ = run_bench(static_cast<int>(words.size()), argv.data());
    results_ = nlohmann::json::parse(testing::internal::GetCapturedStdout());
    fake::end_streams();
  }

  static inline int exit_code_ = -1;
  static inline nlohmann::json results_;
};

TEST_F(NcclBench, MeasuresWithoutAnError) {
  EXPECT_EQ(exit_code_, 0);
  EXPECT_EQ(results_["transport"], "nccl");
  for (const auto& row : results_["sweep"]) {
    EXPECT_EQ(row["errors"], 0);
  }
  EXPECT_FALSE(results_["schedule"].empty());
}

TEST_F(NcclBench, TimesEachOperationOnItsStream) {
  for (const auto& row : results_["sweep"]) {
    EXPECT_GT(row["stream_ns"], 0.0);
    EXPECT_LE(row["stream_ns"], row["time_ns"]) << "it is a part of what the host waits for";
  }
}

TEST_F(NcclBench, MeasuresInAndOutOfPlace) {
  int64_t in_place = 0;
  for (const auto& row : results_["sweep"]) {
    in_place += row["in_place"].get<bool>() ? 1 : 0;
  }
  EXPECT_EQ(results_["sweep"].size(), 24);  // 3 operations of 4 sizes
  EXPECT_EQ(in_place, 12);
}

TEST_F(NcclBench, PackingCostsNothing) {
  ASSERT_TRUE(results_["link"].contains("all_reduce"));
  EXPECT_FALSE(results_["link"].contains("pack_ns_per_byte"));
}

TEST_F(NcclBench, NamesDeviceAndVersions) {
  EXPECT_EQ(results_["ranks"].size(), 1);
  EXPECT_EQ(results_["ranks"][0]["device"], "a device of the tests");
  const std::string libraries = results_["ranks"][0]["libraries"];
  EXPECT_NE(libraries.find(", NCCL 2.29.0, CUDA 12.8, driver for CUDA 13.0"), std::string::npos) << libraries;
}

TEST_F(NcclBench, HasOneCommunicator) {
  EXPECT_EQ(fake::destructions(), 1);
  EXPECT_EQ(fake::communicators() + fake::aborts(), 0);
}

}  // namespace
}  // namespace gradcast
