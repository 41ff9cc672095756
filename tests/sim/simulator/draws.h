// Chance in a run: each draw is a hash of the seed and of what it is for.
//
// A generator with a state would tie a draw to the order of events, so that one late event changed everything after it;
// and every rank would have to carry one.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>

namespace gradcast::sim {

// The finalizer of SplitMix64 (G. Steele, D. Lea, C. Flood, OOPSLA 2014): every bit of the result depends on every bit
// given.
inline uint64_t mixed(uint64_t bits) {
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9U;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebU;
  return bits ^ (bits >> 31);
}

class Draws {
 public:
  enum class For : uint64_t {
    kCompute,
    kStraggler,
    kStragglerFactor,
    kReady,
    kReadyIsLate,
    kReadyLate,
    kAlpha,
    kBytes,
    kCompletion,
    kCompletionIsLate,
    kCompletionLate,
  };
  struct Place {
    int32_t rank = 0;
    int32_t iteration = 0;
    int32_t subject = 0;  // a tensor or a block
  };

  explicit Draws(uint64_t seed) : seed_(mixed(seed + kStep)) {}

  // In [0, 1).
  double share(For use, const Place& place) const {
    const uint64_t when = mixed(seed_ ^ (static_cast<uint64_t>(use) << 32 | static_cast<uint32_t>(place.iteration)));
    const uint64_t where = static_cast<uint64_t>(place.rank) << 32 | static_cast<uint32_t>(place.subject);
    return static_cast<double>(mixed(when + kStep * (where + 1)) >> 11) * 0x1p-53;
  }

 private:
  static constexpr uint64_t kStep = 0x9e3779b97f4a7c15U;  // SplitMix64's: odd, so that no two places meet
  uint64_t seed_;
};

}  // namespace gradcast::sim
