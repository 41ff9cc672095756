// Numbers as people read them, for reasons and error messages.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <string>

namespace gradcast {

// A size in decimal units: "37.6 kB".
std::string bytes_text(int64_t size_bytes);

}  // namespace gradcast
