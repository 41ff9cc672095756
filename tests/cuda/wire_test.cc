// The 16-bit numbers of the wire: the host's functions against the definition, a device's against the host's.
#include "cuda/wire.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "cuda/split.h"

namespace gradcast {
namespace {

constexpr WireFormat kFormats[] = {WireFormat::kBf16, WireFormat::kFp16};

float float_from_bits(uint32_t bits) {
  float number = 0;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

// By the definition of IEEE 754, in double: sign, exponent, mantissa.
double value_of(uint16_t wire, WireFormat format) {
  const int mantissa_bits = format == WireFormat::kBf16 ? 7 : 10;
  const int exponent_bits = 15 - mantissa_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (wire >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = wire & ((1 << mantissa_bits) - 1);
  const double sign = (wire & 0x8000) != 0 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  }
  if (exponent == 0) {
    return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  }
  return sign * std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
}

uint16_t to_wire(float number, WireFormat format) {
  uint16_t wire = 0;
  to_wire(&wire, &number, 1, 1, format);
  return wire;
}

// All magnitudes, subnormal numbers, halfway cases, infinities and NaN among them.
std::vector<float> numbers_of_all_kinds(int64_t count, uint32_t seed) {
  std::mt19937 draw(seed);
  std::vector<float> numbers(static_cast<size_t>(count));
  for (float& number : numbers) {
    const auto bits = static_cast<uint32_t>(draw());
    number = float_from_bits(draw() % 4 == 0   ? bits & 0xffffe000u
                             : draw() % 3 == 0 ? (bits & 0xffff0000u) | 0x8000u
                                               : bits);
  }
  return numbers;
}

TEST(Wire, EveryNumberOfTheFormatIsReadAsDefinedAndComesBack) {
  for (const WireFormat format : kFormats) {
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
      const auto wire = static_cast<uint16_t>(bits);
      float number = 0;
      from_wire(&number, &wire, 1, 1, format);
      const double expected = value_of(wire, format);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(number)) << bits;
        ASSERT_TRUE(std::isnan(value_of(to_wire(number, format), format))) << bits;
      } else {
        ASSERT_EQ(static_cast<double>(number), expected) << bits;
        ASSERT_EQ(to_wire(number, format), wire);
      }
    }
  }
}

TEST(Wire, RoundsToTheNearestAndTiesToEven) {
  for (const WireFormat format : kFormats) {
    for (const float number : numbers_of_all_kinds(300'000, 1)) {
      const uint16_t wire = to_wire(number, format);
      const double value = value_of(wire, format);
      if (std::isnan(number)) {
        ASSERT_TRUE(std::isnan(value));
        continue;
      }
      ASSERT_EQ(std::signbit(number), (wire & 0x8000) != 0);
      if (std::isinf(value)) {
        // The first number too large for the format would be one step above the largest; half a step above rounds up.
        const double largest = value_of(static_cast<uint16_t>((wire & 0x7fff) - 1), format);
        const double step = largest - value_of(static_cast<uint16_t>((wire & 0x7fff) - 2), format);
        ASSERT_GE(std::abs(static_cast<double>(number)), largest + step / 2);
        continue;
      }
      const double error = std::abs(value - static_cast<double>(number));
      for (const int neighbour : {-1, 1}) {
        if ((wire & 0x7fff) == 0 && neighbour < 0) {
          continue;
        }
        const double other = value_of(static_cast<uint16_t>(wire + neighbour), format);
        const double other_error = std::isinf(other) ? error : std::abs(other - static_cast<double>(number));
        ASSERT_LE(error, other_error) << number;
        ASSERT_TRUE(error < other_error || std::isinf(other) || (wire & 1) == 0) << number << " is a tie";
      }
    }
  }
}

TEST(Wire, TheAverageIsFoldedIn) {
  const std::vector<float> numbers = {8, -4, 0, 1e-3F, 3e38F};
  for (const WireFormat format : kFormats) {
    std::vector<uint16_t> wire(numbers.size());
    to_wire(wire.data(), numbers.data(), 5, 0.25F, format);
    std::vector<float> back(numbers.size());
    from_wire(back.data(), wire.data(), 5, 4, format);
    for (size_t i = 0; i < numbers.size(); ++i) {
      ASSERT_EQ(wire[i], to_wire(numbers[i] * 0.25F, format));
      float number = 0;
      from_wire(&number, &wire[i], 1, 1, format);
      ASSERT_EQ(back[i], number * 4);
    }
  }
}

TEST(Split, EveryNumberIsTakenOnceAndVectorsAreAligned) {
  alignas(32) static float numbers[64];
  alignas(32) static uint16_t wire[64];
  int vectors = 0;
  for (int64_t skipped = 0; skipped < 9; ++skipped) {
    for (int64_t wire_skipped = 0; wire_skipped < 9; ++wire_skipped) {
      for (int64_t count = 1; count < 50; ++count) {
        const Split split = split_of(wire + wire_skipped, numbers + skipped, count);
        ASSERT_LE(split.head + kVector * split.vector_count, count);
        if (split.vector_count == 0) continue;
        ++vectors;
        ASSERT_LT(split.head, kVector);
        ASSERT_LT(count - split.head - kVector * split.vector_count, kVector);
        ASSERT_EQ((skipped + split.head) % 4, 0);
        ASSERT_EQ((wire_skipped + split.head) % 8, 0);
      }
      // Where both begin at the same place of a vector, vectors are found.
      ASSERT_TRUE(skipped % 4 != wire_skipped % 4 ||
                  split_of(wire + wire_skipped, numbers + skipped, 40).vector_count ==
                      (40 - (8 - wire_skipped % 8) % 8) / 8);
    }
  }
  EXPECT_GT(vectors, 0);
}

TEST(Checksum, TellsBytesPlacesAndLengthsApart) {
  std::vector<unsigned char> data(1003);
  std::mt19937 draw(2);
  for (unsigned char& byte : data) {
    byte = static_cast<unsigned char>(draw());
  }
  const uint64_t sum = checksum(data.data(), 1003);
  EXPECT_EQ(checksum(data.data(), 1003), sum);
  for (size_t i = 0; i < data.size(); ++i) {
    data[i] ^= 1;
    ASSERT_NE(checksum(data.data(), 1003), sum) << "byte " << i;
    data[i] ^= 1;
  }
  std::swap_ranges(data.begin(), data.begin() + 4, data.begin() + 400);
  EXPECT_NE(checksum(data.data(), 1003), sum);
  EXPECT_NE(checksum(data.data(), 1000), checksum(data.data(), 996));
  EXPECT_EQ(checksum(data.data(), 0), 0U);
}

#ifdef GRADCAST_HAS_CUDA
// Memory of the device, at an offset from where the driver aligns it.
class DeviceBytes {
 public:
  DeviceBytes(size_t size_bytes, size_t offset_bytes) : offset_bytes_(offset_bytes) {
    EXPECT_EQ(cudaMalloc(&memory_, size_bytes + offset_bytes + 16), cudaSuccess);
  }
  ~DeviceBytes() { cudaFree(memory_); }
  template <typename Number>
  Number* as() const {
    return reinterpret_cast<Number*>(static_cast<char*>(memory_) + offset_bytes_);
  }

 private:
  void* memory_ = nullptr;
  size_t offset_bytes_;
};

class WireOnDevice : public testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
      GTEST_SKIP() << "there is no CUDA device here; the kernels are compiled only";
    }
  }
};

TEST_F(WireOnDevice, GivesTheBitsOfTheHostForEveryLengthAndAlignment) {
  std::mt19937 draw(3);
  for (int round = 0; round < 400; ++round) {
    const auto count = static_cast<int64_t>(round < 40 ? round : draw() % 100'000);
    const size_t skipped = draw() % 5;
    const WireFormat format = kFormats[draw() % 2];
    const std::vector<float> numbers = numbers_of_all_kinds(count, static_cast<uint32_t>(draw()));
    const DeviceBytes from(static_cast<size_t>(count) * 4, 4 * skipped);
    const DeviceBytes to(static_cast<size_t>(count) * 2, 2 * (draw() % 9));
    const DeviceBytes back(static_cast<size_t>(count) * 4, 4 * (draw() % 5));
    cudaMemcpy(from.as<float>(), numbers.data(), static_cast<size_t>(count) * 4, cudaMemcpyHostToDevice);
    ASSERT_EQ(to_wire(to.as<uint16_t>(), from.as<float>(), count, 0.5F, format, nullptr), cudaSuccess);
    ASSERT_EQ(from_wire(back.as<float>(), to.as<uint16_t>(), count, 3, format, nullptr), cudaSuccess);
    std::vector<uint16_t> wire(numbers.size()), expected_wire(numbers.size());
    std::vector<float> result(numbers.size()), expected(numbers.size());
    cudaMemcpy(wire.data(), to.as<uint16_t>(), wire.size() * 2, cudaMemcpyDeviceToHost);
    ASSERT_EQ(cudaMemcpy(result.data(), back.as<float>(), result.size() * 4, cudaMemcpyDeviceToHost), cudaSuccess);
    to_wire(expected_wire.data(), numbers.data(), count, 0.5F, format);
    from_wire(expected.data(), expected_wire.data(), count, 3, format);
    for (size_t i = 0; i < numbers.size(); ++i) {
      if (std::isnan(expected[i])) {
        ASSERT_TRUE(std::isnan(result[i]));  // which NaN a product gives is the device's choice
      } else {
        ASSERT_EQ(wire[i], expected_wire[i]) << numbers[i];
        ASSERT_EQ(result[i], expected[i]);
      }
    }
  }
}

TEST_F(WireOnDevice, GivesTheChecksumOfTheHost) {
  std::mt19937 draw(4);
  for (int round = 0; round < 200; ++round) {
    std::vector<unsigned char> data(round < 40 ? static_cast<size_t>(round) : draw() % 500'000);
    for (unsigned char& byte : data) {
      byte = static_cast<unsigned char>(draw());
    }
    const DeviceBytes bytes(data.size(), draw() % 7);
    const DeviceBytes sum(8, 0);
    cudaMemset(sum.as<void>(), 0, 8);
    cudaMemcpy(bytes.as<void>(), data.data(), data.size(), cudaMemcpyHostToDevice);
    ASSERT_EQ(checksum(sum.as<uint64_t>(), bytes.as<void>(), static_cast<int64_t>(data.size()), nullptr), cudaSuccess);
    uint64_t found = 0;
    ASSERT_EQ(cudaMemcpy(&found, sum.as<void>(), 8, cudaMemcpyDeviceToHost), cudaSuccess);
    ASSERT_EQ(found, checksum(data.data(), static_cast<int64_t>(data.size())));
  }
}
#endif

}  // namespace
}  // namespace gradcast
