#include "transport/torch/wire_codec.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>

#include "transport/torch/int8_group.h"

namespace gradcast {

namespace {

at::ScalarType type_of(Encoding encoding) {
  return encoding == Encoding::kBFloat16 ? at::kBFloat16 : at::kHalf;
}

// from_blob() wants a pointer to non-const, also for a tensor that is only read.
template <typename T>
at::Tensor tensor_at(const T* memory, int64_t count, at::ScalarType type) {
  return at::from_blob(const_cast<T*>(memory), {count}, type);
}

// Numbers of 16 or 32 bits.
void encode_exactly_or_half(const Piece& piece, const float* values, std::byte* encoded) {
  if (piece.encoding == Encoding::kFloat32) {
    std::memcpy(encoded, values, static_cast<size_t>(piece.encoded_bytes()));
  } else {
    tensor_at(encoded, piece.count, type_of(piece.encoding)).copy_(tensor_at(values, piece.count, at::kFloat));
  }
}

}  // namespace

void encode_piece(const Piece& piece, const float* buffer, float* residual, std::byte* encoded) {
  const float* values = buffer + piece.first;
  if (piece.encoding != Encoding::kInt8) {
    encode_exactly_or_half(piece, values, encoded);
    return;
  }
  if (!piece.sends_residual) {
    encode_sum(piece, values, residual, encoded);
    return;
  }
  float* errors = residual + piece.first;
  for (int64_t i = 0; i < piece.count; ++i)
    errors[i] += values[i];
  encode_int8_group(errors, piece.count, encoded, errors);
}

void encode_sum(const Piece& piece, const float* sum, float* residual, std::byte* encoded) {
  if (piece.encoding != Encoding::kInt8) {
    encode_exactly_or_half(piece, sum, encoded);
    return;
  }
  float errors[kInt8GroupElements];
  float* own = residual + piece.first;
  if (encode_int8_group(sum, piece.count, encoded, errors)) {
    for (int64_t i = 0; i < piece.count; ++i)
      own[i] += errors[i];
  } else {
    std::fill_n(own, piece.count, 0.0F);
  }
}

void decode_piece(const Piece& piece, const std::byte* encoded, float* values) {
  switch (piece.encoding) {
    case Encoding::kFloat32:
      std::memcpy(values, encoded, static_cast<size_t>(piece.encoded_bytes()));
      return;
    case Encoding::kInt8:
      decode_int8_group(encoded, piece.count, values);
      return;
    case Encoding::kBFloat16:
    case Encoding::kFloat16:
      tensor_at(values, piece.count, at::kFloat).copy_(tensor_at(encoded, piece.count, type_of(piece.encoding)));
  }
}

}  // namespace gradcast
