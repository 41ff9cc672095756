// Bisection for the smallest value that a monotone test accepts.
//
// Thread safety: pure; any thread.
#pragma once

namespace gradcast {

struct Bracket {
  double refused = 0;   // the test says no here
  double accepted = 0;  // and yes here; relatively 1e-10 apart
};

// REQUIRES: accepts(high). `low` is taken as refused.
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

}  // namespace gradcast
