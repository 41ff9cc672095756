// How many seeds a randomized test runs: the usual number, times GRADCAST_SEED_FACTOR, which `make test-long` sets high
// and the slow builds of `make test-sanitize` set below 1.
//
// A failing assertion names its seed (SCOPED_TRACE); the same seed gives the same profile everywhere.
//
// Thread safety: pure; any thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>

namespace gradcast {

inline uint64_t seed_count(uint64_t usual) {
  const char* factor = std::getenv("GRADCAST_SEED_FACTOR");
  if (factor == nullptr) {
    return usual;
  }
  return std::max(uint64_t{1}, static_cast<uint64_t>(static_cast<double>(usual) * std::strtod(factor, nullptr)));
}

}  // namespace gradcast
