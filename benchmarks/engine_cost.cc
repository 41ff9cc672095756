// What the engine costs: per block beyond the transport's own cost, and per gradient on the thread that computes it.
//
// Three networks, each without a cost of its own: one that completes operations inside start() (the engine alone), the
// in-process one (a wire thread that has to be woken, and the engine's thread after it, for every block), and the in-process
// one without an engine, whose cost is to be taken off the second. Blocks are one tensor each and one in flight, so that nothing
// is hidden. The column `per_block` is the time of an iteration over its blocks.
#include <benchmark/benchmark.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "bench/instant_transport.h"
#include "gradcast/engine.h"
#include "gradcast/inproc.h"

namespace gradcast {
namespace {

constexpr int64_t kElements = 16;  // of a tensor: the sum itself must cost nothing

Profile make_profile(int64_t tensor_count) {
  Profile profile;
  profile.name = "benchmark";
  for (int64_t i = 0; i < tensor_count; ++i) {
    Tensor tensor;
    tensor.name = "layer" + std::to_string(i) + ".weight";
    tensor.bytes = 4 * kElements;
    profile.tensors.push_back(tensor);
  }
  return profile;
}

Plan make_plan(int64_t block_count, int64_t tensors_per_block) {
  Plan plan;
  plan.policy = "benchmark";
  for (int64_t block = block_count - 1; block >= 0; --block) {
    const int64_t size_bytes = tensors_per_block * 4 * kElements;
    plan.blocks.emplace_back().ranges = {{block * size_bytes, (block + 1) * size_bytes}};
  }
  return plan;
}

class InprocAlone {
 public:
  explicit InprocAlone(int64_t tensor_count)
      : memory_(static_cast<size_t>(tensor_count * kElements)),
        world_(1),
        transport_(world_.transport(0, {{memory_.data(), tensor_count * 4 * kElements, Element::kFloat32}})) {}
  Transport& transport() { return *transport_; }

 private:
  std::vector<float> memory_;
  InprocWorld world_;
  std::unique_ptr<Transport> transport_;
};

// The time of an iteration over this count.
benchmark::Counter per(int64_t count) {
  return {static_cast<double>(count), benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert};
}

void run_iterations(benchmark::State& state, Transport& transport) {
  const int64_t block_count = state.range(0);
  const Profile profile = make_profile(block_count);
  Engine engine(transport, {});
  engine.follow(profile, make_plan(block_count, 1));
  for (auto iteration : state) {
    engine.begin();
    for (auto tensor = static_cast<int32_t>(block_count - 1); tensor >= 0; --tensor) {
      engine.on_ready(tensor);
    }
    engine.wait_all(-1);
  }
  state.counters["per_block"] = per(block_count);
}

void BM_EngineOnInstantTransport(benchmark::State& state) {
  InstantTransport transport;
  run_iterations(state, transport);
}
BENCHMARK(BM_EngineOnInstantTransport)->Arg(10)->Arg(100)->Arg(1000)->UseRealTime()->Unit(benchmark::kMicrosecond);

void BM_EngineOnInproc(benchmark::State& state) {
  InprocAlone network(state.range(0));
  run_iterations(state, network.transport());
}
BENCHMARK(BM_EngineOnInproc)->Arg(10)->Arg(100)->Arg(1000)->UseRealTime()->Unit(benchmark::kMicrosecond);

// Waits for one completion at a time.
class Waiter final : public CompletionSink {
 public:
  void began(int64_t) noexcept override {}
  void queued(int64_t) noexcept override {}
  void complete(int64_t ticket, const char*) noexcept override {
    {
      std::lock_guard lock(mutex_);
      last_ticket_ = ticket;
    }
    completed_.notify_one();
  }
  void wait(int64_t ticket) {
    std::unique_lock lock(mutex_);
    completed_.wait(lock, [&] { return last_ticket_ == ticket; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable completed_;
  int64_t last_ticket_ = -1;
};

void BM_InprocWithoutEngine(benchmark::State& state) {
  const int64_t block_count = state.range(0);
  const Plan plan = make_plan(block_count, 1);
  InprocAlone network(block_count);
  Waiter waiter;
  network.transport().open(&waiter);
  int64_t ticket = 0;
  for (auto iteration : state) {
    for (const Block& block : plan.blocks) {
      network.transport().start({ticket, block.op, block.buffer, block.ranges.data(), 1});
      waiter.wait(ticket++);
    }
  }
  network.transport().close();
  state.counters["per_block"] = per(block_count);
}
BENCHMARK(BM_InprocWithoutEngine)->Arg(10)->Arg(100)->Arg(1000)->UseRealTime()->Unit(benchmark::kMicrosecond);

// The calls alone, as the thread of backward sees them, with so many tensors in a block; the last of each block wakes the engine.
void BM_OnReady(benchmark::State& state) {
  constexpr int64_t kTensors = 1024;
  const int64_t tensors_per_block = state.range(0);
  InstantTransport transport;
  Engine engine(transport, {});
  engine.follow(make_profile(kTensors), make_plan(kTensors / tensors_per_block, tensors_per_block));
  for (auto iteration : state) {
    engine.begin();
    const auto begin = std::chrono::steady_clock::now();
    for (auto tensor = static_cast<int32_t>(kTensors - 1); tensor >= 0; --tensor) {
      engine.on_ready(tensor);
    }
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
    state.SetIterationTime(elapsed.count());
    engine.wait_all(-1);
  }
  state.counters["per_call"] = per(kTensors);
}
BENCHMARK(BM_OnReady)->Arg(1)->Arg(16)->Arg(1024)->UseManualTime()->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace gradcast
