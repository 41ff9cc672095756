// Numbers as people read them, for reasons and error messages.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <string>

namespace gradcast {

// A size in decimal units: "37.6 kB".
std::string bytes_text(int64_t size_bytes);
// As short as ten digits allow; the limit of sizes and times by its name, "2^53".
std::string number_text(double value);

}  // namespace gradcast
