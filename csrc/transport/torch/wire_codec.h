// Encoding of a block's numbers for the network, on the host.
//
// ATen's own kernels make 16-bit numbers, so that the bits are those of Tensor.to(). They get pieces so small that ATen
// starts no thread pool: it would start one for each of our threads, beside the trainer's.
//
// 8-bit numbers have error feedback (1-bit SGD, Interspeech 2014): a rank adds the rounding error of its numbers to its
// next ones. The owner of a piece also takes over the error of rounding the sum. `residual` holds both, by element of
// the buffer.
//
// Thread safety: pure; any thread, each on its own pieces.
#pragma once

#include <cstddef>

#include "transport/torch/wire_pieces.h"

namespace gradcast {

// Encodes a piece of `buffer` into piece.encoded_bytes() bytes. `residual`: as large as the buffer; nullptr without 8-bit
// numbers.
void encode_piece(const Piece& piece, const float* buffer, float* residual, std::byte* encoded);
// Encodes the sum of a piece: piece.count numbers. The rounding error is added to the residual.
void encode_sum(const Piece& piece, const float* sum, float* residual, std::byte* encoded);
// Decodes a piece into piece.count numbers.
void decode_piece(const Piece& piece, const std::byte* encoded, float* values);

}  // namespace gradcast
