// Which seeds the random scenarios run: 10,000 usually, a million in `make test-long`, one for a replay.
//
// GRADCAST_SIM_SEED=123 build/tests/sim_test --gtest_filter='*Seeds*' runs seed 123 alone and prints what happens in
// it.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <optional>

#include "tests/support/seeds.h"

namespace gradcast {

// In a run that is to be long, simulated seeds are cheap enough for ten times the share of other tests: with the factor
// 10 of `make test-long`, a million.
inline uint64_t sim_seed_count() {
  constexpr uint64_t kUsual = 10'000;
  const uint64_t count = seed_count(kUsual);
  return count > kUsual ? 10 * count : count;
}

inline std::optional<uint64_t> replayed_seed() {
  const char* seed = std::getenv("GRADCAST_SIM_SEED");
  return seed == nullptr ? std::nullopt : std::optional<uint64_t>(std::strtoull(seed, nullptr, 10));
}

}  // namespace gradcast
