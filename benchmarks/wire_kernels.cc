// How near the kernels of the wire formats come to what the memory of the device gives: bytes read and written per second, beside
// a copy on the device. In builds with CUDA.
//
// NOT YET RUN ON A GPU.
#include <benchmark/benchmark.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/wire.h"

namespace gradcast {
namespace {

class Memory {
 public:
  explicit Memory(int64_t size_bytes) { cudaMalloc(&data_, static_cast<size_t>(size_bytes)); }
  ~Memory() { cudaFree(data_); }
  template <typename Number>
  Number* as() const {
    return static_cast<Number*>(data_);
  }

 private:
  void* data_ = nullptr;
};

// So many calls between two events, since the first one waits some microseconds for its launch.
constexpr int kCalls = 16;

// Device time of a call, by events: a launch from the host would count otherwise.
template <typename Call>
void time_calls(benchmark::State& state, int64_t bytes_moved, const Call& call) {
  int device_count = 0;
  if (cudaGetDeviceCount(&device_count) != cudaSuccess || device_count == 0) {
    state.SkipWithError("there is no CUDA device here");
    return;
  }
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  for (auto _ : state) {
    cudaEventRecord(begin);
    cudaError_t error = cudaSuccess;
    for (int i = 0; i < kCalls && error == cudaSuccess; ++i) {
      error = call();
    }
    cudaEventRecord(end);
    if (error != cudaSuccess) {
      state.SkipWithError("the kernel could not be started");
      break;
    }
    cudaEventSynchronize(end);
    float time_ms = 0;
    cudaEventElapsedTime(&time_ms, begin, end);
    state.SetIterationTime(1e-3 / kCalls * static_cast<double>(time_ms));
  }
  state.SetBytesProcessed(state.iterations() * bytes_moved);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
}

void device_copy(benchmark::State& state) {
  const int64_t size_bytes = state.range(0);
  const Memory from(size_bytes), to(size_bytes);
  time_calls(state, 2 * size_bytes, [&] {
    return cudaMemcpyAsync(to.as<void>(), from.as<void>(), static_cast<size_t>(size_bytes), cudaMemcpyDeviceToDevice);
  });
}

// `skipped`: numbers between where the driver aligns memory and the block, which begins where its first tensor lies.
void wire_from_fp32(benchmark::State& state, WireFormat format, int64_t skipped) {
  const int64_t count = state.range(0) / 4;
  const Memory numbers(4 * (count + skipped)), wire(2 * (count + skipped));
  time_calls(state, 6 * count, [&] {
    return to_wire(wire.as<uint16_t>() + skipped, numbers.as<float>() + skipped, count, 0.5F, format, nullptr);
  });
}

void wire_to_fp32(benchmark::State& state, WireFormat format, int64_t skipped) {
  const int64_t count = state.range(0) / 4;
  const Memory numbers(4 * (count + skipped)), wire(2 * (count + skipped));
  time_calls(state, 6 * count, [&] {
    return from_wire(numbers.as<float>() + skipped, wire.as<uint16_t>() + skipped, count, 0.5F, format, nullptr);
  });
}

void sum_of_bytes(benchmark::State& state, int64_t skipped_bytes) {
  const int64_t size_bytes = state.range(0);
  const Memory data(size_bytes + skipped_bytes), sum(8);
  time_calls(state, size_bytes,
             [&] { return checksum(sum.as<uint64_t>(), data.as<char>() + skipped_bytes, size_bytes, nullptr); });
}

constexpr int64_t kLeast = 1 << 20, kMost = 256 << 20;
BENCHMARK(device_copy)->RangeMultiplier(4)->Range(kLeast, kMost)->UseManualTime();
BENCHMARK_CAPTURE(wire_from_fp32, bf16, WireFormat::kBf16, 0)
    ->RangeMultiplier(4)
    ->Range(kLeast, kMost)
    ->UseManualTime();
BENCHMARK_CAPTURE(wire_from_fp32, bf16_at_3, WireFormat::kBf16, 3)
    ->RangeMultiplier(4)
    ->Range(kLeast, kMost)
    ->UseManualTime();
BENCHMARK_CAPTURE(wire_from_fp32, fp16, WireFormat::kFp16, 0)
    ->RangeMultiplier(4)
    ->Range(kLeast, kMost)
    ->UseManualTime();
BENCHMARK_CAPTURE(wire_from_fp32, fp16_at_3, WireFormat::kFp16, 3)
    ->RangeMultiplier(4)
    ->Range(kLeast, kMost)
    ->UseManualTime();
BENCHMARK_CAPTURE(wire_to_fp32, bf16, WireFormat::kBf16, 0)->RangeMultiplier(4)->Range(kLeast, kMost)->UseManualTime();
BENCHMARK_CAPTURE(wire_to_fp32, bf16_at_3, WireFormat::kBf16, 3)
    ->RangeMultiplier(4)
    ->Range(kLeast, kMost)
    ->UseManualTime();
BENCHMARK_CAPTURE(wire_to_fp32, fp16, WireFormat::kFp16, 0)->RangeMultiplier(4)->Range(kLeast, kMost)->UseManualTime();
BENCHMARK_CAPTURE(wire_to_fp32, fp16_at_3, WireFormat::kFp16, 3)
    ->RangeMultiplier(4)
    ->Range(kLeast, kMost)
    ->UseManualTime();
BENCHMARK_CAPTURE(sum_of_bytes, aligned, 0)->RangeMultiplier(4)->Range(kLeast, kMost)->UseManualTime();
BENCHMARK_CAPTURE(sum_of_bytes, at_4, 4)->RangeMultiplier(4)->Range(kLeast, kMost)->UseManualTime();

}  // namespace
}  // namespace gradcast
