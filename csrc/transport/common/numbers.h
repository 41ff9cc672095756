// The numbers of each type of element. bfloat16, which C++20 lacks, is added in float and rounded.
//
// Thread safety: pure; any thread.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "gradcast/transport.h"

namespace gradcast {

class BFloat16 {
 public:
  BFloat16() = default;
  // Rounds to the nearest, of two equally near ones to the even one.
  explicit BFloat16(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const uint32_t half = 0x7fff + ((bits >> 16) & 1);
    bits_ = std::isnan(value) ? uint16_t{0x7fc0} : static_cast<uint16_t>((bits + half) >> 16);
  }
  explicit operator float() const { return std::bit_cast<float>(uint32_t{bits_} << 16); }

  friend BFloat16 operator+(BFloat16 a, BFloat16 b) { return BFloat16(static_cast<float>(a) + static_cast<float>(b)); }

 private:
  uint16_t bits_ = 0;
};

// Calls `action` with a number of this type, whose value says nothing.
template <typename Action>
void with_number(Element element, const Action& action) {
  switch (element) {
    case Element::kFloat32:
      return action(float{});
    case Element::kFloat64:
      return action(double{});
    case Element::kBFloat16:
      return action(BFloat16{});
  }
}

}  // namespace gradcast
