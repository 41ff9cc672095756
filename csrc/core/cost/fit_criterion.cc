#include "cost/fit_criterion.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace gradcast {
namespace {

// No clock and no network repeats itself better than this. Without it, the criterion would pay any number of pieces
// for an exact fit of exact numbers.
constexpr double kRelativeErrorMin = 1e-4;

// In units of the noise. With it three outliers save an error of 6, 12 in the criterion: less than five
// parameters cost from 12 points on.
constexpr double kErrorMax = 2;

// A line and its breakpoint. A breakpoint counts as three parameters: counted as one, which forgets that its place is
// searched for, least squares gave a second piece to a sixth of 200 noisy straight lines and robust fits to a
// twentieth; as three, at most 4 % and 0.5 %.
constexpr double kParametersPerPiece = 2 + 3;

// How far a point lies from the line through its two neighbours, relative to what the three times could add up to.
double roughness(const FitPoint& left, const FitPoint& point, const FitPoint& right) {
  const double share = (point.size_bytes - left.size_bytes) / (right.size_bytes - left.size_bytes);
  const double left_ns = (1 - share) * left.time_ns;
  const double right_ns = share * right.time_ns;
  const double norm_ns = std::sqrt(left_ns * left_ns + right_ns * right_ns + point.time_ns * point.time_ns);
  return std::abs(left_ns + right_ns - point.time_ns) / norm_ns;
}

// The relative error that noise alone explains, whatever the pieces are. Each outlier touches three neighbourhoods,
// half of all if every fifth point is one, so the lower third is what is left to look at; three times its end is 1.3
// standard deviations of normal noise.
double noise_of(std::span<const FitPoint> points) {
  std::vector<double> values;
  for (size_t i = 1; i + 1 < points.size(); ++i)
    values.push_back(roughness(points[i - 1], points[i], points[i + 1]));
  const auto third = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 3);
  std::nth_element(values.begin(), third, values.end());
  return std::max(kRelativeErrorMin, 3 * *third);
}

}  // namespace

FitCriterion::FitCriterion(std::span<const FitPoint> points, FitMethod method)
    : method_(method), point_count_(static_cast<double>(points.size())), noise_(noise_of(points)) {}

double FitCriterion::error_of(std::span<const FitPoint> points, const FitLine& line) const {
  double total = 0;
  for (const FitPoint& point : points) {
    const double error_ns = std::abs(line.at(point.size_bytes) - point.time_ns);
    if (method_ == FitMethod::kLeastSquares) {
      total += (error_ns / point.time_ns) * (error_ns / point.time_ns);
    } else {
      // Relative to the larger of the two: an operation half as long as the line says is as far off as
      // one twice as long.
      total += std::min(kErrorMax, error_ns / std::max(line.at(point.size_bytes), point.time_ns) / noise_);
    }
  }
  return total;
}

double FitCriterion::of(double error, int32_t piece_count) const {
  const double parameters = kParametersPerPiece * piece_count * std::log(point_count_);
  // Laplace errors count with the known noise, normal errors with the variance that fits best.
  if (method_ == FitMethod::kRobust) return 2 * error + parameters;
  const double variance = std::max(error / point_count_, kRelativeErrorMin * kRelativeErrorMin);
  return point_count_ * std::log(variance) + parameters;
}

}  // namespace gradcast
