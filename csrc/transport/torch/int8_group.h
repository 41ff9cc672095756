// A group of fp32 numbers as 8-bit numbers with one scale: the int8 wire format.
//
// A number v is sent as the nearest code q (ties to even) with v ≈ scale · q, where scale = max |v| / 127. A group with
// an infinity or a NaN carries those alone, and zeros: so they arrive as such.
//
// The encoded group: the scale, a float (negative in a group with infinities or NaNs), then one signed byte per number.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gradcast {

// The most numbers in a group. Fewer need more scales; more lose precision beside a large number.
constexpr int64_t kInt8GroupElements = 128;

constexpr int64_t int8_group_bytes(int64_t count) {
  return static_cast<int64_t>(sizeof(float)) + count;
}

// Encodes `count` numbers into int8_group_bytes(count) bytes. `errors`, which may be `values`, gets value - decoded
// value, or zeros in a group with an infinity or a NaN. Returns true if it had none.
bool encode_int8_group(const float* values, int64_t count, std::byte* encoded, float* errors);

void decode_int8_group(const std::byte* encoded, int64_t count, float* values);

}  // namespace gradcast
