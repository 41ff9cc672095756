// One line through points whose errors are relative: the step that a piecewise fit repeats.
//
// Thread safety: pure; any thread.
#pragma once

#include <span>

namespace gradcast {

struct FitPoint {
  double size_bytes = 0;
  double time_ns = 0;
  double weight = 1;  // how many samples it stands for
};

struct FitLine {
  double alpha_ns = 0;
  double beta_ns_per_byte = 0;

  double at(double size_bytes) const { return alpha_ns + beta_ns_per_byte * size_bytes; }
};

// Neither alpha nor beta is negative. REQUIRES: at least two points, sizes ascending and different, times positive.
FitLine least_squares_line(std::span<const FitPoint> points);
FitLine robust_line(std::span<const FitPoint> points);

}  // namespace gradcast
