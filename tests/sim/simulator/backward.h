// The backward pass of one rank in one iteration: when each gradient is ready, and when the pass ends.
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

  // Takes the next gradient in order of time. Only one per rank is in the event queue, which would otherwise grow with
  // ranks times tensors.
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
