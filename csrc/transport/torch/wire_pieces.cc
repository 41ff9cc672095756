#include "transport/torch/wire_pieces.h"

#include <utility>

namespace gradcast {

int64_t Piece::encoded_bytes() const {
  switch (encoding) {
    case Encoding::kFloat32:
      return 4 * count;
    case Encoding::kBFloat16:
    case Encoding::kFloat16:
      return 2 * count;
    case Encoding::kInt8:
      break;
  }
  return int8_group_bytes(count);
}

BlockPieces::BlockPieces(std::vector<Range> ranges, int world_size, Encoding encoding, GroupSegments segments)
    : ranges_(std::move(ranges)),
      world_size_(world_size),
      encoding_(encoding),
      segments_(std::move(segments)),
      element_count_(size_bytes(ranges_) / kElementBytes) {}

int64_t BlockPieces::element_count(int owner) const {
  int64_t count = 0;
  for_each(owner, [&](const Piece& piece) { count += piece.count; });
  return count;
}

int64_t BlockPieces::encoded_bytes(int owner) const {
  int64_t bytes = 0;
  for_each(owner, [&](const Piece& piece) { bytes += piece.encoded_bytes(); });
  return bytes;
}

}  // namespace gradcast
