// Zigzag: the exact plan for nested windows, one block in flight and a linear cost. docs/internals/planner.md states and proves
// it.
//
// For an iteration time T every tensor has a window [ready, deadline]. On a chain of windows, each inside the next,
// grow one time interval from the window of the most urgent tensor: whenever the bytes that fit inside reach tensor k,
// which sticks out, extend the interval to the left (to its ready time: one more block in backward) or to the right (to
// its deadline: one more block in forward). T can be reached exactly when some sequence of such moves makes all bytes
// fit, and the fewest moves give the fewest blocks.
//
// Source: ours; nothing published. Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "gradcast/link.h"

namespace gradcast {

// Tensors whose windows form a chain: from one to the next, ready does not rise and need does not fall.
struct Chain {
  std::vector<double> ready_ns;
  std::vector<double> need_ns;
  std::vector<double> end_bytes;  // bytes of this tensor and all before it
  double backward_ns = 0;
  double forward_ns = 0;
  OpCost cost;  // where it is not linear, the plan is a good one and not a proof

  int32_t tensor_count() const { return static_cast<int32_t>(ready_ns.size()); }
};

enum class Side { kBackward, kCentre, kForward };

// The time that one block may use and the bytes of the chain that fill it.
struct TimeSlot {
  Side side = Side::kCentre;
  int32_t tensor = 0;  // position in the chain of the tensor whose window set this slot's outer end
  double start_ns = 0;
  double finish_ns = 0;
  double lo_bytes = 0;
  double hi_bytes = 0;
};

// True if some sequence of moves reaches `iteration_ns`. Monotone in it for a linear cost. For a bent one it need not
// be: where the interval is longer, one block may replace two that cost less.
bool reachable(const Chain& chain, double iteration_ns);

// The slots, in time order, of a plan with the fewest blocks that reaches `iteration_ns`; nothing if none with at most
// `block_count_max` does. Among those with the fewest, the one with the most room to spare.
std::optional<std::vector<TimeSlot>> zigzag(const Chain& chain, double iteration_ns, int32_t block_count_max);

struct Bracket {
  double refused = 0;   // the test says no here
  double accepted = 0;  // and yes here; relatively 1e-10 above
};
// Bisection for the smallest value that a monotone test accepts. REQUIRES: accepts(high). `low` is taken as refused.
template <typename Accepts>
Bracket bisect(double low, double high, Accepts accepts) {
  // Finer than any measured time, and far above the rounding of sums of times.
  constexpr double kWidth = 1e-10;
  Bracket bracket{low, high};
  while (bracket.accepted - bracket.refused > kWidth * bracket.accepted) {
    const double middle = bracket.refused + (bracket.accepted - bracket.refused) / 2;
    (accepts(middle) ? bracket.accepted : bracket.refused) = middle;
  }
  return bracket;
}

struct ChainOptimum {
  double bound_ns = 0;    // proven: no plan is faster
  double reached_ns = 0;  // zigzag() succeeds here; within 1e-9 of bound_ns where the cost is linear
};
// The optimum T* of a chain, by bisection from its plain bound.
ChainOptimum optimum(const Chain& chain);

// max over i of ready[i] + cost of one block of all bytes up to i + what forward runs after need[i], and backward +
// forward.
double plain_bound_ns(const Chain& chain);

// The most bytes that one operation of `duration_ns` carries, bytes being divisible: OpCost::capacity_bytes() for
// proofs.
double divisible_capacity_bytes(const OpCost& cost, double duration_ns);

}  // namespace gradcast
