// What converting fp32 numbers to 8-bit ones and back costs, beside copying them: bytes of fp32 per second.
#include <benchmark/benchmark.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "transport/torch/int8_group.h"

namespace gradcast {
namespace {

constexpr int64_t kGroups = 1 << 17;  // 64 MiB of fp32: no cache holds it
constexpr int64_t kElements = kGroups * kInt8GroupElements;

std::vector<float> numbers() {
  std::vector<float> values(static_cast<size_t>(kElements));
  std::mt19937 generator;
  std::normal_distribution<float> normal;
  for (float& value : values)
    value = normal(generator);
  return values;
}

void count_bytes(benchmark::State& state) {
  state.SetBytesProcessed(state.iterations() * kElements * static_cast<int64_t>(sizeof(float)));
}

void copy(benchmark::State& state) {
  const std::vector<float> values = numbers();
  std::vector<float> target(values.size());
  for (auto _ : state) {
    std::memcpy(target.data(), values.data(), values.size() * sizeof(float));
    benchmark::ClobberMemory();
  }
  count_bytes(state);
}
BENCHMARK(copy);

// With error feedback: the errors of the last time are added first.
void encode(benchmark::State& state) {
  const std::vector<float> values = numbers();
  std::vector<float> errors(values.size());
  std::vector<std::byte> encoded(static_cast<size_t>(kGroups * int8_group_bytes(kInt8GroupElements)));
  for (auto _ : state) {
    for (int64_t group = 0; group < kGroups; ++group) {
      float* own = errors.data() + group * kInt8GroupElements;
      for (int64_t i = 0; i < kInt8GroupElements; ++i)
        own[i] += values[static_cast<size_t>(group * kInt8GroupElements + i)];
      encode_int8_group(own, kInt8GroupElements, encoded.data() + group * int8_group_bytes(kInt8GroupElements), own);
    }
    benchmark::ClobberMemory();
  }
  count_bytes(state);
}
BENCHMARK(encode);

void decode(benchmark::State& state) {
  const std::vector<float> values = numbers();
  std::vector<float> target(values.size());
  std::vector<std::byte> encoded(static_cast<size_t>(kGroups * int8_group_bytes(kInt8GroupElements)));
  for (int64_t group = 0; group < kGroups; ++group) {
    encode_int8_group(values.data() + group * kInt8GroupElements, kInt8GroupElements,
                      encoded.data() + group * int8_group_bytes(kInt8GroupElements), target.data());
  }
  for (auto _ : state) {
    for (int64_t group = 0; group < kGroups; ++group) {
      decode_int8_group(encoded.data() + group * int8_group_bytes(kInt8GroupElements), kInt8GroupElements,
                        target.data() + group * kInt8GroupElements);
    }
    benchmark::ClobberMemory();
  }
  count_bytes(state);
}
BENCHMARK(decode);

}  // namespace
}  // namespace gradcast
