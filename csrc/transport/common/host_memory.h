// Gradient buffers of transports: checks, packing and names of an operation.
//
// Thread safety: pure; any thread. Two threads that touch the same bytes are the caller's affair.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gradcast/error.h"
#include "gradcast/transport.h"
#include "gradcast/types.h"

namespace gradcast {

inline int64_t element_bytes(Element element) {
  return element == Element::kBFloat16 ? 2 : element == Element::kFloat32 ? 4 : 8;
}

inline std::string_view to_string(Element element) {
  return element == Element::kBFloat16 ? "bfloat16" : element == Element::kFloat32 ? "float32" : "float64";
}

// The bytes that operations on a buffer read.
inline const char* source_of(const HostBuffer& buffer) {
  return static_cast<const char*>(buffer.source == nullptr ? buffer.data : buffer.source);
}

// The facts about a buffer, in host or device memory, that the checks of an operation need.
struct Extent {
  int64_t size_bytes = 0;
  int64_t element_bytes = 4;
};

inline std::vector<Extent> extents_of(std::span<const HostBuffer> buffers) {
  std::vector<Extent> extents;
  for (const HostBuffer& buffer : buffers) {
    extents.push_back({buffer.size_bytes, element_bytes(buffer.element)});
  }
  return extents;
}

// Throws Error{kInvalidOption} for a buffer that is not a whole number of elements.
inline void check_extents(std::span<const Extent> extents) {
  for (const Extent& extent : extents) {
    if (extent.size_bytes < 0 || extent.size_bytes % extent.element_bytes != 0) {
      throw Error(ErrorCode::kInvalidOption,
                  "a buffer of " + std::to_string(extent.size_bytes) + " bytes cuts an element; give whole elements");
    }
  }
}

inline std::span<const Range> ranges_of(const Operation& operation) {
  return {operation.ranges, static_cast<size_t>(operation.range_count)};
}

inline int64_t size_bytes(const Operation& operation) {
  return size_bytes(ranges_of(operation));
}

// Text for messages: "[0, 400), [800, 804)".
inline std::string ranges_text(const Operation& operation) {
  std::string text;
  for (const Range& range : ranges_of(operation)) {
    text += (text.empty() ? "[" : ", [") + std::to_string(range.lo_bytes) + ", " + std::to_string(range.hi_bytes) + ")";
  }
  return text;
}

// "all_reduce of 4000 bytes failed on rank 1 of 4 (MPI): ", to be followed by the library's own message.
inline std::string failure_text(const Operation& operation, int32_t rank, int32_t world_size,
                                const std::string& library) {
  return std::string(to_string(operation.op)) + " of " + std::to_string(size_bytes(operation)) +
         " bytes failed on rank " + std::to_string(rank) + " of " + std::to_string(world_size) + " (" + library + "): ";
}

// The reason why an operation cannot begin on these buffers: an unknown buffer, or ranges that are not ascending whole
// elements of it. Nothing if it can.
inline std::optional<std::string> fault_of(const Operation& operation, std::span<const Extent> extents) {
  if (operation.buffer < 0 || static_cast<size_t>(operation.buffer) >= extents.size()) {
    return "buffer " + std::to_string(operation.buffer) + " does not exist; there are " +
           std::to_string(extents.size());
  }
  const Extent& extent = extents[static_cast<size_t>(operation.buffer)];
  int64_t end_bytes = 0;
  for (const Range& range : ranges_of(operation)) {
    if (range.lo_bytes < end_bytes || range.hi_bytes <= range.lo_bytes || range.hi_bytes > extent.size_bytes ||
        range.lo_bytes % extent.element_bytes != 0 || range.hi_bytes % extent.element_bytes != 0) {
      return "the ranges " + ranges_text(operation) + " are not ascending whole elements of a buffer of " +
             std::to_string(extent.size_bytes) + " bytes";
    }
    end_bytes = range.hi_bytes;
  }
  return operation.range_count > 0 ? std::nullopt : std::optional<std::string>("an operation has no ranges");
}

// Copies the ranges that an operation reads into a contiguous message, and a message to where the result belongs. REQUIRES: fault_of() found nothing.
inline void pack(void* message, const HostBuffer& buffer, std::span<const Range> ranges) {
  auto* to = static_cast<char*>(message);
  for (const Range& range : ranges) {
    std::memcpy(to, source_of(buffer) + range.lo_bytes, static_cast<size_t>(range.size_bytes()));
    to += range.size_bytes();
  }
}
inline void unpack(const HostBuffer& buffer, std::span<const Range> ranges, const void* message) {
  const auto* from = static_cast<const char*>(message);
  for (const Range& range : ranges) {
    std::memcpy(static_cast<char*>(buffer.data) + range.lo_bytes, from, static_cast<size_t>(range.size_bytes()));
    from += range.size_bytes();
  }
}

}  // namespace gradcast
