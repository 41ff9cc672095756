// Gradient buffers in host memory.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>

namespace gradcast {

enum class Element { kFloat32, kFloat64 };

// The memory of one gradient buffer. It must stay valid until the transport is closed.
struct HostBuffer {
  void* data = nullptr;
  int64_t size_bytes = 0;  // a multiple of the element's size
  Element element = Element::kFloat32;
};

}  // namespace gradcast
