// Single numbers as 16-bit ones, for host and device alike: by their bits, so that both give the same.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define GRADCAST_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define GRADCAST_HOST_DEVICE inline
#endif

namespace gradcast {

GRADCAST_HOST_DEVICE uint32_t bits_of(float number) {
  uint32_t bits = 0;
  memcpy(&bits, &number, sizeof bits);
  return bits;
}

GRADCAST_HOST_DEVICE float float_of(uint32_t bits) {
  float number = 0;
  memcpy(&number, &bits, sizeof number);
  return number;
}

// The upper half of a float: 8 bits of exponent, 7 of mantissa.
struct Bf16 {
  GRADCAST_HOST_DEVICE static uint16_t from(float number) {
    const uint32_t bits = bits_of(number);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
      return static_cast<uint16_t>((bits >> 16) | 0x40u);  // rounding could make an infinity of a NaN
    }
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
  GRADCAST_HOST_DEVICE static float to(uint16_t wire) { return float_of(static_cast<uint32_t>(wire) << 16); }
};

// IEEE half precision: 5 bits of exponent, 10 of mantissa, subnormal numbers below 2^-14.
struct Fp16 {
  GRADCAST_HOST_DEVICE static uint16_t from(float number) {
    const uint32_t bits = bits_of(number);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
      return static_cast<uint16_t>(sign | 0x7e00u);
    }
    if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
      return static_cast<uint16_t>(sign | 0x7c00u);
    }
    if (magnitude < 0x38800000u) {
      // Subnormal: adding 0.5 puts the bits that stay at the end of the mantissa, rounded by the hardware.
      return static_cast<uint16_t>(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u));
    }
    const uint32_t odd = (magnitude >> 13) & 1u;
    return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
  }
  GRADCAST_HOST_DEVICE static float to(uint16_t wire) {
    const uint32_t sign = static_cast<uint32_t>(wire & 0x8000u) << 16;
    const uint32_t magnitude = wire & 0x7fffu;
    if (magnitude >= 0x7c00u) {
      return float_of(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
    }
    // 2^112 is the difference of the two exponents' offsets; the product is exact, also for subnormal numbers.
    return float_of(sign | bits_of(float_of(magnitude << 13) * 5.192296858534828e33f));
  }
};

inline constexpr int64_t kWordBytes = 8;

// What the word at `index` adds to a checksum: every bit of word and place goes into every bit of it (the finalizer of
// SplitMix64: G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
GRADCAST_HOST_DEVICE uint64_t checksum_term(uint64_t word, int64_t index) {
  uint64_t mixed = (static_cast<uint64_t>(index) + 1) * 0x9e3779b97f4a7c15ull + word;
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9ull;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebull;
  return mixed ^ (mixed >> 31);
}

// The word at `index`, bytes behind the end taken for 0.
GRADCAST_HOST_DEVICE uint64_t word_at(const unsigned char* data, int64_t size_bytes, int64_t index) {
  uint64_t word = 0;
  for (int64_t i = 0; i < kWordBytes && kWordBytes * index + i < size_bytes; ++i) {
    word |= static_cast<uint64_t>(data[kWordBytes * index + i]) << (8 * i);
  }
  return word;
}

}  // namespace gradcast
