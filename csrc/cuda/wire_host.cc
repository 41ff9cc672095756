#include "cuda/numbers.h"
#include "cuda/wire.h"

namespace gradcast {
namespace {

template <typename Number>
void to_wire_of(uint16_t* wire, const float* numbers, int64_t count, float factor) {
  for (int64_t i = 0; i < count; ++i) {
    wire[i] = Number::from(numbers[i] * factor);
  }
}

template <typename Number>
void from_wire_of(float* numbers, const uint16_t* wire, int64_t count, float factor) {
  for (int64_t i = 0; i < count; ++i) {
    numbers[i] = Number::to(wire[i]) * factor;
  }
}

}  // namespace

void to_wire(uint16_t* wire, const float* numbers, int64_t count, float factor, WireFormat format) {
  format == WireFormat::kBf16 ? to_wire_of<Bf16>(wire, numbers, count, factor)
                              : to_wire_of<Fp16>(wire, numbers, count, factor);
}

void from_wire(float* numbers, const uint16_t* wire, int64_t count, float factor, WireFormat format) {
  format == WireFormat::kBf16 ? from_wire_of<Bf16>(numbers, wire, count, factor)
                              : from_wire_of<Fp16>(numbers, wire, count, factor);
}

uint64_t checksum(const void* data, int64_t size_bytes) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  uint64_t sum = 0;
  for (int64_t index = 0; kWordBytes * index < size_bytes; ++index) {
    sum += checksum_term(word_at(bytes, size_bytes, index), index);
  }
  return sum;
}

}  // namespace gradcast
