#include "cost/pieces.h"

#include <algorithm>
#include <map>
#include <utility>

namespace gradcast {

std::vector<int32_t> by_ready(const Problem& problem) {
  std::vector<int32_t> order(problem.bytes.size());
  for (size_t i = 0; i < order.size(); ++i) {
    order[i] = static_cast<int32_t>(order.size() - 1 - i);
  }
  const auto earlier = [&](int32_t a, int32_t b) { return problem.ready_ns[a] < problem.ready_ns[b]; };
  // The usual profile, whose backward mirrors forward, is in order already.
  if (!std::is_sorted(order.begin(), order.end(), earlier)) {
    std::stable_sort(order.begin(), order.end(), earlier);
  }
  return order;
}

Block piece_block(const Problem& problem, const Piece& piece, std::string reason) {
  const int64_t offset_bytes = problem.offset_bytes[piece.tensor];
  const Range range{offset_bytes + piece.from_bytes, offset_bytes + piece.to_bytes};
  return {.buffer = problem.buffer[piece.tensor], .ranges = {range}, .reason = std::move(reason)};
}

std::vector<Block> joint_blocks(const Problem& problem, std::span<const Piece> pieces, const std::string& reason) {
  std::vector<Block> blocks;
  std::map<int32_t, size_t> block_of_buffer;
  for (const Piece& piece : pieces) {
    const auto [found, added] = block_of_buffer.try_emplace(problem.buffer[piece.tensor], blocks.size());
    if (added) {
      blocks.push_back(piece_block(problem, piece, reason));
    } else {
      const int64_t offset_bytes = problem.offset_bytes[piece.tensor];
      blocks[found->second].ranges.push_back({offset_bytes + piece.from_bytes, offset_bytes + piece.to_bytes});
    }
  }
  for (Block& block : blocks) {
    block.ranges = joined(std::move(block.ranges));
  }
  return blocks;
}

std::vector<Range> joined(std::vector<Range> ranges) {
  const auto before = [](const Range& a, const Range& b) { return a.lo_bytes < b.lo_bytes; };
  // Ready order usually runs through the buffer from its end.
  if (ranges.size() > 1 && before(ranges[1], ranges[0])) {
    std::reverse(ranges.begin(), ranges.end());
  }
  if (!std::is_sorted(ranges.begin(), ranges.end(), before)) {
    std::sort(ranges.begin(), ranges.end(), before);
  }
  std::vector<Range> merged;
  for (const Range& range : ranges) {
    if (!merged.empty() && merged.back().hi_bytes == range.lo_bytes) {
      merged.back().hi_bytes = range.hi_bytes;
    } else {
      merged.push_back(range);
    }
  }
  return merged;
}

}  // namespace gradcast
