// The backward pass of one rank in one iteration: when it ends, and when the event of each gradient comes.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "tests/sim/simulator/draws.h"
#include "tests/sim/simulator/simulate.h"

namespace gradcast::sim {

class Backward {
 public:
  struct Gradient {
    double time_ns = 0;
    int32_t tensor = 0;
  };

  void begin(const SimScenario& scenario, const Draws& draws, int32_t rank, int32_t iteration, double now_ns);

  // The next gradient in the order of time, and moves on. One at a time, so that the queue does not hold those of every rank.
  std::optional<Gradient> next();

  double end_ns() const { return end_ns_; }
  // How much slower than the profile this rank computes in this iteration, forward too.
  double factor() const { return factor_; }

 private:
  double end_ns_ = 0;
  double factor_ = 1;
  std::vector<Gradient> gradients_;  // by time, then tensor
  size_t next_ = 0;
};

}  // namespace gradcast::sim
