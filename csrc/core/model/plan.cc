#include "gradcast/plan.h"

#include <algorithm>
#include <string>
#include <vector>

#include "gradcast/error.h"

namespace gradcast {
namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidPlan, message);
}

std::string place(size_t block_index) {
  return "blocks[" + std::to_string(block_index) + "]";
}

void check_block(const Block& block, size_t k, const std::vector<BufferLayout>& layouts) {
  if (block.buffer < 0 || static_cast<size_t>(block.buffer) >= layouts.size() ||
      layouts[block.buffer].tensors.empty()) {
    refuse(place(k) + ".buffer is " + std::to_string(block.buffer) + ", which the profile does not have");
  }
  if (block.ranges.empty()) {
    refuse(place(k) + " has no ranges; a block carries at least one byte");
  }
  const BufferLayout& layout = layouts[block.buffer];
  int64_t previous_hi_bytes = -1;
  for (size_t r = 0; r < block.ranges.size(); ++r) {
    const auto [lo, hi] = block.ranges[r];
    // Built for a fault only: a plan may have a million ranges.
    const auto where = [&, lo = lo, hi = hi] {
      return place(k) + ".ranges[" + std::to_string(r) + "] = [" + std::to_string(lo) + ", " + std::to_string(hi) + "]";
    };
    if (lo < 0 || hi <= lo || hi > layout.size_bytes()) {
      refuse(where() + " is empty or outside its buffer of " + std::to_string(layout.size_bytes()) +
             " bytes; the plan was made for another profile, or edited");
    }
    if (lo % layout.element_bytes != 0 || hi % layout.element_bytes != 0) {
      refuse(where() + " cuts an element of " + std::to_string(layout.element_bytes) + " bytes");
    }
    if (lo <= previous_hi_bytes) {
      refuse(where() + " overlaps or adjoins the range before it; ranges of a block are ascending, with gaps");
    }
    previous_hi_bytes = hi;
  }
}

// A set of disjoint byte ranges of one buffer with the block that carries them.
struct Carried {
  Range range;
  size_t block;
};

// Throws if two ranges of `carried` (sorted here) share a byte; returns their total.
int64_t check_disjoint(std::vector<Carried>& carried, int32_t buffer, const char* what) {
  std::ranges::sort(carried, {}, [](const Carried& piece) { return piece.range.lo_bytes; });
  int64_t total_bytes = 0;
  for (size_t i = 0; i < carried.size(); ++i) {
    if (i > 0 && carried[i].range.lo_bytes < carried[i - 1].range.hi_bytes) {
      refuse("byte " + std::to_string(carried[i].range.lo_bytes) + " of buffer " + std::to_string(buffer) + " is " +
             what + " twice, in " + place(carried[i - 1].block) + " and " + place(carried[i].block));
    }
    total_bytes += carried[i].range.size_bytes();
  }
  return total_bytes;
}

// First byte of [0, bytes) that the sorted, disjoint ranges omit.
int64_t first_gap_bytes(const std::vector<Carried>& carried) {
  int64_t end_bytes = 0;
  for (const Carried& piece : carried) {
    if (piece.range.lo_bytes > end_bytes) {
      break;
    }
    end_bytes = piece.range.hi_bytes;
  }
  return end_bytes;
}

// Every gathered byte was scattered by an earlier block, and every scattered byte is gathered: both sets have the same
// bytes, and where a gather overlaps a scatter it comes later in the plan.
void check_gathers(const std::vector<Carried>& scatters, const std::vector<Carried>& gathers, int32_t buffer) {
  size_t s = 0;
  for (const Carried& gather : gathers) {
    int64_t at_bytes = gather.range.lo_bytes;
    while (at_bytes < gather.range.hi_bytes) {
      while (s < scatters.size() && scatters[s].range.hi_bytes <= at_bytes) {
        ++s;
      }
      if (s == scatters.size() || scatters[s].range.lo_bytes > at_bytes || scatters[s].block >= gather.block) {
        refuse(place(gather.block) + " gathers byte " + std::to_string(at_bytes) + " of buffer " +
               std::to_string(buffer) + ", which no earlier block has reduce-scattered");
      }
      at_bytes = std::min(scatters[s].range.hi_bytes, gather.range.hi_bytes);
    }
  }
}

// The ranges of one buffer, by what is done to them.
struct BufferRanges {
  std::vector<Carried> reduced;  // by an all-reduce or a reduce-scatter: once each
  std::vector<Carried> scatters;
  std::vector<Carried> gathers;
};

std::vector<BufferRanges> ranges_by_buffer(const Plan& plan, size_t buffer_count) {
  std::vector<BufferRanges> buffers(buffer_count);
  for (size_t k = 0; k < plan.blocks.size(); ++k) {
    const Block& block = plan.blocks[k];
    BufferRanges& buffer = buffers[block.buffer];
    for (const Range& range : block.ranges) {
      (block.op == Op::kAllGather ? buffer.gathers : buffer.reduced).push_back({range, k});
      if (block.op == Op::kReduceScatter) {
        buffer.scatters.push_back({range, k});
      }
    }
  }
  return buffers;
}

void check_buffer(BufferRanges& ranges, int32_t buffer, int64_t buffer_bytes) {
  const int64_t reduced_bytes = check_disjoint(ranges.reduced, buffer, "reduced");
  const int64_t scattered_bytes = check_disjoint(ranges.scatters, buffer, "reduced");
  const int64_t gathered_bytes = check_disjoint(ranges.gathers, buffer, "gathered");
  if (reduced_bytes != buffer_bytes) {
    refuse("byte " + std::to_string(first_gap_bytes(ranges.reduced)) + " of buffer " + std::to_string(buffer) +
           " is in no block; a plan carries every byte once");
  }
  check_gathers(ranges.scatters, ranges.gathers, buffer);
  if (gathered_bytes != scattered_bytes) {
    refuse("buffer " + std::to_string(buffer) + " has " + std::to_string(scattered_bytes - gathered_bytes) +
           " bytes that are reduce-scattered and never gathered");
  }
}

// 64-bit mixing by the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
class Hasher {
 public:
  void add(uint64_t word) {
    state_ += word + 0x9e3779b97f4a7c15ULL;
    state_ = (state_ ^ (state_ >> 30)) * 0xbf58476d1ce4e5b9ULL;
    state_ = (state_ ^ (state_ >> 27)) * 0x94d049bb133111ebULL;
    state_ ^= state_ >> 31;
  }
  void add(std::string_view text) {
    add(text.size());
    for (const char c : text) {
      add(static_cast<uint64_t>(static_cast<unsigned char>(c)));
    }
  }
  uint64_t value() const { return state_; }

 private:
  uint64_t state_ = 0;
};

}  // namespace

std::span<const int32_t> BufferLayout::tensors_in(Range range) const {
  const auto first = std::upper_bound(end_bytes.begin(), end_bytes.end(), range.lo_bytes);
  const auto last = std::lower_bound(first, end_bytes.end(), range.hi_bytes) + 1;
  return {tensors.begin() + (first - end_bytes.begin()), tensors.begin() + (last - end_bytes.begin())};
}

std::vector<BufferLayout> buffers_of(const Profile& profile) {
  std::vector<BufferLayout> buffers;
  for (size_t i = 0; i < profile.tensors.size(); ++i) {
    const Tensor& tensor = profile.tensors[i];
    buffers.resize(std::max(buffers.size(), static_cast<size_t>(tensor.buffer) + 1));
    BufferLayout& buffer = buffers[tensor.buffer];
    buffer.tensors.push_back(static_cast<int32_t>(i));
    buffer.end_bytes.push_back(buffer.size_bytes() + tensor.bytes);
    buffer.element_bytes = tensor.element_bytes;
  }
  return buffers;
}

void check_plan(const Plan& plan, const Profile& profile) {
  if (plan.in_flight < 1) {
    refuse("in_flight is " + std::to_string(plan.in_flight) + "; at least one block must be in flight");
  }
  const std::vector<BufferLayout> layouts = buffers_of(profile);
  for (size_t k = 0; k < plan.blocks.size(); ++k) {
    check_block(plan.blocks[k], k, layouts);
  }
  std::vector<BufferRanges> ranges = ranges_by_buffer(plan, layouts.size());
  for (size_t buffer = 0; buffer < layouts.size(); ++buffer) {
    check_buffer(ranges[buffer], static_cast<int32_t>(buffer), layouts[buffer].size_bytes());
  }
}

uint64_t hash_plan(const Plan& plan, const Profile& profile) {
  // Buffer by buffer: how the tensors of different buffers alternate in urgency order changes no byte on the wire.
  std::vector<const Tensor*> layout;
  for (const Tensor& tensor : profile.tensors) {
    layout.push_back(&tensor);
  }
  std::ranges::stable_sort(layout, {}, &Tensor::buffer);

  Hasher hasher;
  hasher.add(layout.size());
  for (const Tensor* tensor : layout) {
    hasher.add(tensor->name);
    hasher.add(static_cast<uint64_t>(tensor->bytes));
    hasher.add(static_cast<uint64_t>(tensor->buffer));
    hasher.add(static_cast<uint64_t>(tensor->element_bytes));
  }
  hasher.add(plan.blocks.size());
  for (const Block& block : plan.blocks) {
    hasher.add(static_cast<uint64_t>(block.op));
    hasher.add(static_cast<uint64_t>(block.buffer));
    hasher.add(block.ranges.size());
    for (const Range& range : block.ranges) {
      hasher.add(static_cast<uint64_t>(range.lo_bytes));
      hasher.add(static_cast<uint64_t>(range.hi_bytes));
    }
  }
  return hasher.value();
}

}  // namespace gradcast
