#include "transport/torch/int8_group.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

// The compiler makes a second version of each loop for processors with AVX2, where it can; the bits are the same.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define GC_VECTORISED __attribute__((target_clones("avx2", "default"), optimize("O3")))
#else
#define GC_VECTORISED
#endif

namespace gradcast {

namespace {

constexpr float kLargestCode = 127.0F;
constexpr int8_t kNan = -128;  // in a group with infinities or NaNs, where 127 and -127 are infinities
// Added to a number of at most 2^22 in absolute value, it leaves the nearest integer, ties to even, in the low bits.
constexpr float kRounder = 12582912.0F;  // 1.5 * 2^23

// The bits of a non-negative float grow with its value, and those of infinities and NaNs are above all others.
GC_VECTORISED uint32_t largest_magnitude_bits(const float* values, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, values + i, sizeof(bits));
    largest = std::max(largest, bits & 0x7FFFFFFFU);
  }
  return largest;
}

GC_VECTORISED void round_to_codes(const float* values, int64_t count, float scale, float inverse, int8_t* codes,
                                  float* errors) {
  for (int64_t i = 0; i < count; ++i) {
    const float value = values[i];
    const float code = (value * inverse + kRounder) - kRounder;
    codes[i] = static_cast<int8_t>(static_cast<int32_t>(code));
    errors[i] = value - code * scale;
  }
}

GC_VECTORISED void scale_codes(const int8_t* codes, int64_t count, float scale, float* values) {
  for (int64_t i = 0; i < count; ++i)
    values[i] = static_cast<float>(codes[i]) * scale;
}

int8_t special_code(float value) {
  if (std::isnan(value)) return kNan;
  return static_cast<int8_t>(std::isinf(value) ? std::copysign(kLargestCode, value) : 0.0F);
}

}  // namespace

bool encode_int8_group(const float* values, int64_t count, std::byte* encoded, float* errors) {
  auto* codes = reinterpret_cast<int8_t*>(encoded + sizeof(float));
  const float largest = std::bit_cast<float>(largest_magnitude_bits(values, count));
  const bool is_finite = std::isfinite(largest);
  float scale = is_finite ? largest / kLargestCode : -1.0F;
  if (!is_finite) {
    std::transform(values, values + count, codes, special_code);
    std::fill_n(errors, count, 0.0F);
  } else if (scale < std::numeric_limits<float>::min()) {
    // Too small to be divided by; the error feedback keeps the numbers until they have grown.
    scale = 0;
    std::memset(codes, 0, static_cast<size_t>(count));
    std::memmove(errors, values, static_cast<size_t>(count) * sizeof(float));
  } else {
    round_to_codes(values, count, scale, 1 / scale, codes, errors);
  }
  std::memcpy(encoded, &scale, sizeof(scale));
  return is_finite;
}

void decode_int8_group(const std::byte* encoded, int64_t count, float* values) {
  float scale;
  std::memcpy(&scale, encoded, sizeof(scale));
  const auto* codes = reinterpret_cast<const int8_t*>(encoded + sizeof(float));
  if (scale >= 0) {
    scale_codes(codes, count, scale, values);
    return;
  }
  std::transform(codes, codes + count, values, [](int8_t code) {
    if (code == kNan) return std::numeric_limits<float>::quiet_NaN();
    return code == 0 ? 0.0F : std::copysign(std::numeric_limits<float>::infinity(), static_cast<float>(code));
  });
}

}  // namespace gradcast
