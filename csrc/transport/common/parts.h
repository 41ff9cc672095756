// The parts of a block by rank, for reduce-scatter and all-gather: gradcast/transport.h is the contract.
//
// Thread safety: pure; any thread.
#pragma once

#include <algorithm>
#include <cstdint>

namespace gradcast {

// Elements of every rank's part but the last ranks', whose parts are shorter or empty.
constexpr int64_t part_size(int64_t element_count, int32_t world_size) {
  return (element_count + world_size - 1) / world_size;
}

// Elements [first, last) of a block.
struct Part {
  int64_t first = 0;
  int64_t last = 0;

  int64_t count() const { return last - first; }
};

inline Part part_of(int32_t rank, int32_t world_size, int64_t element_count) {
  const int64_t size = part_size(element_count, world_size);
  return {std::min(rank * size, element_count), std::min((rank + 1) * size, element_count)};
}

}  // namespace gradcast
