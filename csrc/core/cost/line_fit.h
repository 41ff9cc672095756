// One line through points whose errors are relative, the step that a piecewise fit repeats; how well pieces of lines fit,
// and how many pieces are worth it.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <span>

#include "gradcast/link_fit.h"

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
FitLine fit_line(std::span<const FitPoint> points, FitMethod method);

// The Bayesian information criterion: -2 log likelihood + (number of parameters) ln (number of points); the number of
// pieces with the smallest value wins.
class FitCriterion {
 public:
  // REQUIRES: at least three points, sizes ascending and different.
  FitCriterion(std::span<const FitPoint> points, FitMethod method);

  // The error of a line at its points; errors of pieces add up. Least squares: the squares of the relative errors.
  // Robust: their sizes in units of the noise, bounded, so that three outliers cannot buy a piece of their own.
  double error_of(std::span<const FitPoint> points, const FitLine& line) const;

  // The criterion of piece_count pieces with the total error `error`.
  double of(double error, int32_t piece_count) const;

 private:
  FitMethod method_;
  double point_count_;
  double noise_;
};

}  // namespace gradcast
