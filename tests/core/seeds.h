// How many seeds a randomized test runs: the usual number, times GRADCAST_SEED_FACTOR, which `make test-long` sets.
//
// A failing assertion names its seed (SCOPED_TRACE); the same seed gives the same profile everywhere.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace gradcast {

inline uint64_t seed_count(uint64_t usual) {
  const char* factor = std::getenv("GRADCAST_SEED_FACTOR");
  return factor == nullptr ? usual : usual * std::strtoull(factor, nullptr, 10);
}

}  // namespace gradcast
