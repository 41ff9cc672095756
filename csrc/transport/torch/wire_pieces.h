// The numbers of a block by rank, and their encoding for the network.
//
// Each number of a block has one owner, the rank that sums it. With 8-bit numbers the owner follows from the tensor, not
// from the block, because the owner also keeps the error of rounding the sum: so results do not depend on the plan.
// Otherwise rank r owns the r-th of equal parts of the block.
//
// Thread safety: pure; any thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "gradcast/types.h"
#include "transport/common/parts.h"
#include "transport/torch/int8_group.h"

namespace gradcast {

enum class Encoding : uint8_t { kFloat32, kBFloat16, kFloat16, kInt8 };

// Adjacent numbers of a buffer that are encoded together, with one owner.
struct Piece {
  int64_t first = 0;  // element of the buffer
  int64_t count = 0;
  Encoding encoding = Encoding::kFloat32;
  bool sends_residual = true;  // see GroupSegment

  int64_t encoded_bytes() const;
};

// A part of a buffer in groups of kInt8GroupElements, the last one shorter. It begins at a multiple of that size, and
// the next segment too; numbers between them are not sent. Rank (first_owner + k) mod W owns group k.
struct GroupSegment {
  int64_t first = 0;  // element of the buffer
  int64_t count = 0;
  Encoding encoding = Encoding::kInt8;  // kFloat32: exact
  int32_t first_owner = 0;
  // True if the residual is sent with the numbers. Not if this rank has no gradient: if no rank has one, nobody uses
  // the result.
  bool sends_residual = true;
};

// Shared, since a thread that an abort has left behind may still read them.
using GroupSegments = std::shared_ptr<const std::vector<GroupSegment>>;

// The most elements of a piece, so that a core's cache holds it.
constexpr int64_t kPieceElements = 32768;

class BlockPieces {
 public:
  // A block of these ranges of a buffer of fp32 numbers, all of them in `encoding`; or, if there are `segments`
  // (ascending), in groups. REQUIRES: with segments, ranges begin and end at multiples of kInt8GroupElements.
  BlockPieces(std::vector<Range> ranges, int world_size, Encoding encoding, GroupSegments segments);

  // Calls visit(const Piece&) for those of one owner, ascending.
  template <typename Visit>
  void for_each(int owner, const Visit& visit) const;

  int64_t element_count(int owner) const;
  int64_t encoded_bytes(int owner) const;

 private:
  static constexpr int64_t kElementBytes = 4;

  template <typename Visit>
  void visit_part(int owner, const Visit& visit) const;
  template <typename Visit>
  void visit_groups(int owner, const Visit& visit) const;

  std::vector<Range> ranges_;
  int world_size_;
  Encoding encoding_;
  GroupSegments segments_;
  int64_t element_count_;
};

template <typename Visit>
void BlockPieces::for_each(int owner, const Visit& visit) const {
  if (segments_->empty()) {
    visit_part(owner, visit);
  } else {
    visit_groups(owner, visit);
  }
}

template <typename Visit>
void BlockPieces::visit_part(int owner, const Visit& visit) const {
  const Part part = part_of(owner, world_size_, element_count_);
  int64_t passed = 0;  // elements of the ranges before this one
  for (const Range& range : ranges_) {
    const int64_t lo = range.lo_bytes / kElementBytes, size = range.size_bytes() / kElementBytes;
    const int64_t first = std::max(part.first - passed, int64_t{0}), last = std::min(part.last - passed, size);
    for (int64_t at = first; at < last; at += kPieceElements)
      visit(Piece{lo + at, std::min(kPieceElements, last - at), encoding_});
    passed += size;
  }
}

template <typename Visit>
void BlockPieces::visit_groups(int owner, const Visit& visit) const {
  for (const Range& range : ranges_) {
    const int64_t lo = range.lo_bytes / kElementBytes, hi = range.hi_bytes / kElementBytes;
    const auto ends_before = [lo](const GroupSegment& each) { return each.first + each.count <= lo; };
    auto segment = std::partition_point(segments_->begin(), segments_->end(), ends_before);
    for (; segment != segments_->end() && segment->first < hi; ++segment) {
      const int64_t begin = std::max(lo - segment->first, int64_t{0}) / kInt8GroupElements;
      const int64_t end = std::min(hi - segment->first, segment->count);
      const int64_t lead = (owner - segment->first_owner - begin) % world_size_;
      for (int64_t group = begin + (lead + world_size_) % world_size_; group * kInt8GroupElements < end;
           group += world_size_) {
        const int64_t at = group * kInt8GroupElements;
        visit(Piece{segment->first + at, std::min(kInt8GroupElements, end - at), segment->encoding,
                    segment->sends_residual});
      }
    }
  }
}

}  // namespace gradcast
