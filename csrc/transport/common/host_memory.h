// Gradient buffers as transports see them: how an operation is checked, packed and named.
//
// Thread safety: pure; any thread. Two threads that touch the same bytes are the caller's affair.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gradcast/host_buffer.h"
#include "gradcast/transport.h"
#include "gradcast/types.h"

namespace gradcast {

int64_t element_bytes(Element element);
std::string_view to_string(Element element);  // "float32", "float64"

// What the checks of an operation need to know of a buffer, in host or device memory.
struct Extent {
  int64_t size_bytes = 0;
  int64_t element_bytes = 4;
};
std::vector<Extent> extents_of(std::span<const HostBuffer> buffers);

// Throws Error{kInvalidOption} for a buffer that is not a whole number of elements.
void check_extents(std::span<const Extent> extents);

std::span<const Range> ranges_of(const Operation& operation);
int64_t size_bytes(const Operation& operation);
// For people: "[0, 400), [800, 804)".
std::string ranges_text(const Operation& operation);
// "all_reduce of 4000 bytes failed on rank 1 of 4 (MPI): ", to be followed by the library's own message.
std::string failure_text(const Operation& operation, int32_t rank, int32_t world_size, const char* library);
// Why an operation cannot begin on these buffers: an unknown buffer, or ranges that are not ascending whole elements of
// it. Nothing if it can.
std::optional<std::string> fault_of(const Operation& operation, std::span<const Extent> extents);

// Copies the ranges of a buffer into a contiguous message, and back. REQUIRES: fault_of() found nothing.
void pack(void* message, const HostBuffer& buffer, std::span<const Range> ranges);
void unpack(const HostBuffer& buffer, std::span<const Range> ranges, const void* message);

}  // namespace gradcast
