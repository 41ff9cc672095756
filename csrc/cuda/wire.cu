// NOT YET RUN ON A GPU; compiled for sm_80, sm_90, sm_100 and as PTX. tests/cuda holds it against the host's functions.
#include <algorithm>
#include <cstdint>

#include "cuda/numbers.h"
#include "cuda/split.h"
#include "cuda/wire.h"

namespace gradcast {
namespace {

constexpr int kThreads = 256;
// Enough to fill any GPU; threads walk on in strides of the grid.
constexpr int64_t kBlocksMax = 2048;

int blocks_for(int64_t work) {
  return static_cast<int>(std::clamp<int64_t>((work + kThreads - 1) / kThreads, 1, kBlocksMax));
}

__device__ int64_t first_index() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

__device__ int64_t stride() {
  return static_cast<int64_t>(gridDim.x) * blockDim.x;
}

// The i-th of the numbers that go one by one.
__device__ int64_t single(int64_t i, Split split) {
  return i < split.head ? i : i + kVector * split.vector_count;
}

// Two 16-bit numbers as the word that holds them in memory.
__device__ uint32_t pair_of(uint16_t low, uint16_t high) {
  return static_cast<uint32_t>(low) | static_cast<uint32_t>(high) << 16;
}

template <typename Number>
__global__ void to_wire_kernel(uint16_t* wire, const float* numbers, int64_t count, float factor, Split split) {
  const auto* in = reinterpret_cast<const float4*>(numbers + split.head);
  auto* out = reinterpret_cast<uint4*>(wire + split.head);
  for (int64_t i = first_index(); i < split.vector_count; i += stride()) {
    const float4 a = in[2 * i];
    const float4 b = in[2 * i + 1];
    out[i] = make_uint4(pair_of(Number::from(a.x * factor), Number::from(a.y * factor)),
                        pair_of(Number::from(a.z * factor), Number::from(a.w * factor)),
                        pair_of(Number::from(b.x * factor), Number::from(b.y * factor)),
                        pair_of(Number::from(b.z * factor), Number::from(b.w * factor)));
  }
  for (int64_t i = first_index(); i < count - kVector * split.vector_count; i += stride()) {
    const int64_t place = single(i, split);
    wire[place] = Number::from(numbers[place] * factor);
  }
}

template <typename Number>
__global__ void from_wire_kernel(float* numbers, const uint16_t* wire, int64_t count, float factor, Split split) {
  const auto* in = reinterpret_cast<const uint4*>(wire + split.head);
  auto* out = reinterpret_cast<float4*>(numbers + split.head);
  const auto low = [factor](uint32_t pair) { return Number::to(static_cast<uint16_t>(pair)) * factor; };
  const auto high = [factor](uint32_t pair) { return Number::to(static_cast<uint16_t>(pair >> 16)) * factor; };
  for (int64_t i = first_index(); i < split.vector_count; i += stride()) {
    const uint4 w = in[i];
    out[2 * i] = make_float4(low(w.x), high(w.x), low(w.y), high(w.y));
    out[2 * i + 1] = make_float4(low(w.z), high(w.z), low(w.w), high(w.w));
  }
  for (int64_t i = first_index(); i < count - kVector * split.vector_count; i += stride()) {
    const int64_t place = single(i, split);
    numbers[place] = Number::to(wire[place]) * factor;
  }
}

// A word of a checksum, read in parts as large as the alignment of the data allows.
template <typename Part>
__device__ uint64_t whole_word(const unsigned char* data, int64_t index) {
  constexpr int64_t kParts = kWordBytes / sizeof(Part);
  const Part* parts = reinterpret_cast<const Part*>(data) + kParts * index;
  uint64_t word = 0;
  for (int64_t i = 0; i < kParts; ++i) {
    word |= static_cast<uint64_t>(parts[i]) << (8 * sizeof(Part) * i);
  }
  return word;
}

template <typename Part>
__global__ void checksum_kernel(uint64_t* sum, const unsigned char* data, int64_t size_bytes) {
  uint64_t own = 0;
  const int64_t whole_count = size_bytes / kWordBytes;
#pragma unroll 4  // so that several loads of a thread are under way at a time
  for (int64_t i = first_index(); i < whole_count; i += stride()) {
    own += checksum_term(whole_word<Part>(data, i), i);
  }
  if (first_index() == 0 && kWordBytes * whole_count < size_bytes) {
    own += checksum_term(word_at(data, size_bytes, whole_count), whole_count);
  }
  for (int lane = 16; lane > 0; lane /= 2) {
    own += __shfl_down_sync(0xffffffffu, own, lane);
  }
  if (threadIdx.x % 32 == 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(sum), static_cast<unsigned long long>(own));
  }
}

__global__ void spin_kernel(int64_t duration_ns) {
  const auto now_ns = [] {
    uint64_t time_ns = 0;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time_ns));
    return static_cast<int64_t>(time_ns);
  };
  const int64_t begin_ns = now_ns();
  while (now_ns() - begin_ns < duration_ns) {
    __nanosleep(500);
  }
}

int blocks_for(Split split, int64_t count) {
  return blocks_for(split.vector_count > 0 ? split.vector_count : count);
}

}  // namespace

cudaError_t to_wire(uint16_t* wire, const float* numbers, int64_t count, float factor, WireFormat format,
                    cudaStream_t stream) {
  if (count == 0) {
    return cudaSuccess;
  }
  const Split split = split_of(wire, numbers, count);
  const int blocks = blocks_for(split, count);
  if (format == WireFormat::kBf16) {
    to_wire_kernel<Bf16><<<blocks, kThreads, 0, stream>>>(wire, numbers, count, factor, split);
  } else {
    to_wire_kernel<Fp16><<<blocks, kThreads, 0, stream>>>(wire, numbers, count, factor, split);
  }
  return cudaGetLastError();
}

cudaError_t from_wire(float* numbers, const uint16_t* wire, int64_t count, float factor, WireFormat format,
                      cudaStream_t stream) {
  if (count == 0) {
    return cudaSuccess;
  }
  const Split split = split_of(wire, numbers, count);
  const int blocks = blocks_for(split, count);
  if (format == WireFormat::kBf16) {
    from_wire_kernel<Bf16><<<blocks, kThreads, 0, stream>>>(numbers, wire, count, factor, split);
  } else {
    from_wire_kernel<Fp16><<<blocks, kThreads, 0, stream>>>(numbers, wire, count, factor, split);
  }
  return cudaGetLastError();
}

cudaError_t checksum(uint64_t* sum, const void* data, int64_t size_bytes, cudaStream_t stream) {
  if (size_bytes == 0) {
    return cudaSuccess;
  }
  const auto* bytes = static_cast<const unsigned char*>(data);
  const auto address = reinterpret_cast<uintptr_t>(data);
  auto* kernel = address % 8 == 0   ? checksum_kernel<uint64_t>
                 : address % 4 == 0 ? checksum_kernel<uint32_t>
                                    : checksum_kernel<unsigned char>;
  kernel<<<blocks_for(size_bytes / kWordBytes), kThreads, 0, stream>>>(sum, bytes, size_bytes);
  return cudaGetLastError();
}

cudaError_t spin(int64_t duration_ns, cudaStream_t stream) {
  spin_kernel<<<1, 1, 0, stream>>>(duration_ns);
  return cudaGetLastError();
}

}  // namespace gradcast
