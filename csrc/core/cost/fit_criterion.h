// How well pieces of lines fit points with relative errors, and how many pieces are worth it.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <span>

#include "cost/line_fit.h"
#include "gradcast/link_fit.h"

namespace gradcast {

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
