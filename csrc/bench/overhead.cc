#include <algorithm>
#include <string>
#include <vector>

#include "bench/instant_transport.h"
#include "gradcast/engine.h"
#include "gradcast/error.h"
#include "platform/clock.h"

namespace gradcast {
namespace {

constexpr int32_t kBlocks = 1000;
constexpr int32_t kIterations = 21;

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

}  // namespace

Overhead engine_overhead() {
  Profile profile;
  Plan plan;
  for (int32_t i = 0; i < kBlocks; ++i) {
    profile.tensors.push_back({.name = "tensor " + std::to_string(i), .bytes = 4});
    plan.blocks.emplace_back().ranges = {{4 * i, 4 * i + 4}};
  }
  InstantTransport transport;
  Engine engine(transport, {});
  engine.follow(profile, plan);
  std::vector<double> block_ns;
  std::vector<double> ready_ns;
  for (int32_t iteration = 0; iteration < kIterations; ++iteration) {
    engine.begin();
    const int64_t begin_ns = steady_now_ns();
    for (int32_t i = kBlocks - 1; i >= 0; --i) {  // the first block is ready last, so that all follow in one go
      engine.on_ready(i);
    }
    const int64_t said_ns = steady_now_ns();
    GC_CHECK(engine.wait_all(60'000'000'000));
    ready_ns.push_back(static_cast<double>(said_ns - begin_ns) / kBlocks);
    block_ns.push_back(static_cast<double>(steady_now_ns() - said_ns) / kBlocks);
  }
  return {median(block_ns), median(ready_ns)};
}

}  // namespace gradcast
