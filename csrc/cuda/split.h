// Which numbers of a block a kernel can move 16 bytes at a time.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>

namespace gradcast {

inline constexpr int64_t kVector = 8;  // numbers that a thread takes at once: 32 bytes of fp32, 16 of the wire
inline constexpr uintptr_t kVectorBytes = 16;

// The first `head` numbers one by one, then so many vectors, then the rest one by one.
struct Split {
  int64_t head = 0;
  int64_t vector_count = 0;
};

// A block begins wherever its first tensor lies, so vectors begin where both arrays are aligned. Where they never are at the
// same number, all go one by one; whoever chooses the place of one array avoids that by a wire address that is, modulo 8,
// half of the numbers' modulo 16.
inline Split split_of(const uint16_t* wire, const float* numbers, int64_t count) {
  const auto is_aligned = [](const void* place) { return reinterpret_cast<uintptr_t>(place) % kVectorBytes == 0; };
  for (int64_t head = 0; head < kVector && head < count; ++head) {
    if (is_aligned(wire + head) && is_aligned(numbers + head)) return {head, (count - head) / kVector};
  }
  return {count, 0};
}

}  // namespace gradcast
