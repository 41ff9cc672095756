#include "gradcast/link_fit.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gradcast/error.h"

namespace gradcast {
namespace {

struct FitPoint {
  double size_bytes = 0;
  double time_ns = 0;
  double weight = 1;  // how many samples it stands for
};

double time_at(const LinkLine& line, double size_bytes) {
  return line.alpha_ns + line.beta_ns_per_byte * size_bytes;
}

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

LinkLine robust_line(std::span<const FitPoint> points) {
  std::vector<Weighted> slopes;
  slopes.reserve(points.size() * (points.size() - 1) / 2);
  for (size_t i = 0; i < points.size(); ++i) {
    for (size_t j = i + 1; j < points.size(); ++j) {
      const double distance_bytes = points[j].size_bytes - points[i].size_bytes;
      const double slope = (points[j].time_ns - points[i].time_ns) / distance_bytes;
      // Times have relative errors, so a pair shows its slope the better the farther its sizes differ and the
      // smaller its times. Of 500 lines with alpha 10 ms, 5 % noise and every fifth time an outlier, the worst beta is
      // 9 % off with these weights and 54 % off without.
      const double precision = distance_bytes / (points[i].time_ns + points[j].time_ns);
      slopes.push_back({slope, precision * points[i].weight * points[j].weight});
    }
  }
  const double beta = std::max(0.0, weighted_median(slopes));
  std::vector<Weighted> intercepts;
  for (const FitPoint& point : points) {
    intercepts.push_back({point.time_ns - beta * point.size_bytes, point.weight / point.time_ns});
  }
  const double alpha_ns = weighted_median(intercepts);
  if (alpha_ns >= 0) return {alpha_ns, beta};

  std::vector<Weighted> rates;  // of lines through the origin
  for (const FitPoint& point : points) {
    rates.push_back({point.time_ns / point.size_bytes, point.weight * point.size_bytes / point.time_ns});
  }
  return {0, weighted_median(rates)};
}

// The sum over the points of `term`, which is given each point's weight in a sum of squared relative errors.
template <typename Term>
double weighted_sum(std::span<const FitPoint> points, Term term) {
  double sum = 0;
  for (const FitPoint& point : points)
    sum += term(point, point.weight / (point.time_ns * point.time_ns));
  return sum;
}

LinkLine least_squares_line(std::span<const FitPoint> points) {
  using Point = const FitPoint&;
  const double weights = weighted_sum(points, [](Point, double weight) { return weight; });
  const double times = weighted_sum(points, [](Point point, double weight) { return weight * point.time_ns; });
  const double sizes = weighted_sum(points, [](Point point, double weight) { return weight * point.size_bytes; });
  const double mean_bytes = sizes / weights;
  const double mean_ns = times / weights;
  // Sums around the mean: those of the plain normal equations cancel where the sizes are close to each other.
  const double squares = weighted_sum(points, [&](Point point, double weight) {
    const double distance_bytes = point.size_bytes - mean_bytes;
    return weight * distance_bytes * distance_bytes;
  });
  const double products = weighted_sum(points, [&](Point point, double weight) {
    return weight * (point.size_bytes - mean_bytes) * (point.time_ns - mean_ns);
  });
  const double beta = products / squares;
  const double alpha_ns = mean_ns - beta * mean_bytes;
  // The sum of squares is convex, so the best line with both limits has the value 0 that the free one falls below.
  if (beta < 0) return {mean_ns, 0};
  if (alpha_ns < 0) {
    return {0, weighted_sum(points, [](Point p, double weight) { return weight * p.size_bytes * p.time_ns; }) /
                   weighted_sum(points, [](Point p, double weight) { return weight * p.size_bytes * p.size_bytes; })};
  }
  return {alpha_ns, beta};
}

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

// The distance of a point from the line through its two neighbours, relative to the norm of the three times.
double roughness(const FitPoint& left, const FitPoint& point, const FitPoint& right) {
  const double share = (point.size_bytes - left.size_bytes) / (right.size_bytes - left.size_bytes);
  const double left_ns = (1 - share) * left.time_ns;
  const double right_ns = share * right.time_ns;
  const double norm_ns = std::sqrt(left_ns * left_ns + right_ns * right_ns + point.time_ns * point.time_ns);
  return std::abs(left_ns + right_ns - point.time_ns) / norm_ns;
}

// The relative error that noise alone explains, for any pieces. Each outlier touches three neighbourhoods,
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

// The line through points whose errors are relative: the step that a piecewise fit repeats. Neither alpha nor beta is
// negative. REQUIRES: at least two points, sizes ascending and different, times positive.
LinkLine fit_line(std::span<const FitPoint> points, FitMethod method) {
  GC_CHECK(points.size() >= 2);
  return method == FitMethod::kLeastSquares ? least_squares_line(points) : robust_line(points);
}

// The Bayesian information criterion: -2 log likelihood + (number of parameters) ln (number of points); the number of
// pieces with the smallest value wins.
class FitCriterion {
 public:
  // REQUIRES: at least three points, sizes ascending and different.
  FitCriterion(std::span<const FitPoint> points, FitMethod method)
      : method_(method), point_count_(static_cast<double>(points.size())), noise_(noise_of(points)) {}

  // The error of a line at its points; errors of pieces add up. Least squares: the squares of the relative errors.
  // Robust: their sizes in units of the noise, bounded, so that three outliers cannot buy a piece of their own.
  double error_of(std::span<const FitPoint> points, const LinkLine& line) const {
    double total = 0;
    for (const FitPoint& point : points) {
      const double error_ns = std::abs(time_at(line, point.size_bytes) - point.time_ns);
      if (method_ == FitMethod::kLeastSquares) {
        total += (error_ns / point.time_ns) * (error_ns / point.time_ns);
      } else {
        // Relative to the larger of the two: an operation half as long as the line says is as far off as
        // one twice as long.
        total += std::min(kErrorMax, error_ns / std::max(time_at(line, point.size_bytes), point.time_ns) / noise_);
      }
    }
    return total;
  }

  // The criterion of piece_count pieces with the total error `error`.
  double of(double error, int32_t piece_count) const {
    const double parameters = kParametersPerPiece * piece_count * std::log(point_count_);
    // Laplace errors count with the known noise, normal errors with the variance that fits best.
    if (method_ == FitMethod::kRobust) return 2 * error + parameters;
    const double variance = std::max(error / point_count_, kRelativeErrorMin * kRelativeErrorMin);
    return point_count_ * std::log(variance) + parameters;
  }

 private:
  FitMethod method_;
  double point_count_;
  double noise_;
};

// Two points always lie on a line; a third is the least that can speak against it.
constexpr size_t kSizesPerPieceMin = 3;
// The dynamic programme fits a line to each of n^2/2 ranges of sizes, from up to n^2/2 pairs: 48 sizes, three per
// doubling from 4 KB to 256 MB, take some 10 ms.
constexpr size_t kPointsMax = 48;
constexpr int32_t kPiecesMax = 8;

[[noreturn]] void refuse_sample(size_t index, const char* field, double value, const char* advice) {
  throw Error(ErrorCode::kInvalidLink,
              "samples[" + std::to_string(index) + "]." + field + " is " + number_text(value) + "; " + advice);
}

void check_samples(std::span<const LinkSample> samples) {
  for (size_t i = 0; i < samples.size(); ++i) {
    const double size_bytes = static_cast<double>(samples[i].size_bytes);
    if (samples[i].size_bytes < 1 || samples[i].size_bytes > kBytesMax) {
      refuse_sample(i, "size_bytes", size_bytes, "a size is from 1 to 2^53 bytes");
    }
    if (!(samples[i].time_ns > 0 && samples[i].time_ns <= static_cast<double>(kBytesMax))) {
      refuse_sample(i, "time_ns", samples[i].time_ns, "a time is above 0 and at most 2^53 ns");
    }
  }
}

std::vector<LinkSample> sorted(std::span<const LinkSample> samples) {
  std::vector<LinkSample> result(samples.begin(), samples.end());
  std::ranges::sort(result, {}, [](const LinkSample& each) { return std::pair(each.size_bytes, each.time_ns); });
  return result;
}

// The first sample of each size, and the end.
std::vector<size_t> size_starts(std::span<const LinkSample> samples) {
  std::vector<size_t> starts;
  for (size_t i = 0; i < samples.size(); ++i) {
    if (i == 0 || samples[i].size_bytes != samples[i - 1].size_bytes) starts.push_back(i);
  }
  starts.push_back(samples.size());
  return starts;
}

double mean_of(std::span<const double> values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

double median_of(std::span<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// One point per size, or per group of neighbouring sizes. Both the mean and the (lower) median of points on a rising
// line lie on that line, so grouping does not bend it.
FitPoint point_of(std::span<const LinkSample> samples, FitMethod method) {
  std::vector<double> sizes_bytes;
  std::vector<double> times_ns;
  for (const LinkSample& sample : samples) {
    sizes_bytes.push_back(static_cast<double>(sample.size_bytes));
    times_ns.push_back(sample.time_ns);
  }
  const double weight = static_cast<double>(samples.size());
  if (method == FitMethod::kLeastSquares) return {mean_of(sizes_bytes), mean_of(times_ns), weight};
  return {median_of(sizes_bytes), median_of(times_ns), weight};
}

std::vector<FitPoint> points_of(std::span<const LinkSample> samples, FitMethod method) {
  const std::vector<size_t> starts = size_starts(samples);
  const size_t size_count = starts.size() - 1;
  if (size_count < kSizesPerPieceMin) {
    throw Error(ErrorCode::kInvalidLink,
                "the samples have " + std::to_string(size_count) +
                    " different sizes; measure at least 3, from the smallest to the largest block");
  }
  const size_t point_count = std::min(size_count, kPointsMax);
  std::vector<FitPoint> points;
  for (size_t i = 0; i < point_count; ++i) {
    const size_t first = starts[i * size_count / point_count];
    const size_t last = starts[(i + 1) * size_count / point_count];
    points.push_back(point_of(samples.subspan(first, last - first), method));
  }
  return points;
}

// Points [first, last) of one piece.
struct Segment {
  size_t first;
  size_t last;
};

// The errors of every segment, looked up by its ends.
class SegmentErrors {
 public:
  SegmentErrors(std::span<const FitPoint> points, FitMethod method, const FitCriterion& criterion)
      : stride_(points.size() + 1), errors_(stride_ * stride_, std::numeric_limits<double>::infinity()) {
    for (size_t first = 0; first < points.size(); ++first) {
      for (size_t last = first + kSizesPerPieceMin; last <= points.size(); ++last) {
        const auto segment = points.subspan(first, last - first);
        errors_[first * stride_ + last] = criterion.error_of(segment, fit_line(segment, method));
      }
    }
  }
  double of(Segment segment) const { return errors_[segment.first * stride_ + segment.last]; }

 private:
  size_t stride_;
  std::vector<double> errors_;
};

// The segmentation with the best criterion: best_error[last] is the least error of points [0, last) in the current
// number of pieces, start[pieces][last] where its last piece begins.
std::vector<Segment> best_segments(std::span<const FitPoint> points, const LinkFitOptions& options) {
  const FitCriterion criterion(points, options.method);
  const SegmentErrors errors(points, options.method, criterion);
  const size_t count = points.size();
  std::vector<double> best_error(count + 1);
  for (size_t last = 0; last <= count; ++last)
    best_error[last] = errors.of({0, last});
  std::vector<std::vector<size_t>> starts{std::vector<size_t>(count + 1, 0)};
  double best_value = criterion.of(best_error[count], 1);
  size_t piece_count = 1;
  for (int32_t pieces = 2; pieces <= options.max_pieces; ++pieces) {
    std::vector<double> error(count + 1, std::numeric_limits<double>::infinity());
    std::vector<size_t> start(count + 1, 0);
    for (size_t last = 0; last <= count; ++last) {
      for (size_t first = 0; first < last; ++first) {
        const double sum = best_error[first] + errors.of({first, last});
        if (sum < error[last]) std::tie(error[last], start[last]) = std::pair(sum, first);
      }
    }
    best_error = std::move(error);
    starts.push_back(std::move(start));
    const double value = criterion.of(best_error[count], pieces);
    if (value < best_value) {
      best_value = value;
      piece_count = static_cast<size_t>(pieces);
    }
  }
  std::vector<Segment> segments(piece_count);
  for (size_t piece = piece_count, last = count; piece-- > 0;) {
    segments[piece] = {starts[piece][last], last};
    last = segments[piece].first;
  }
  return segments;
}

// Where the left piece ends: at the crossing of the lines if it lies between the two sizes or, as noise may have moved
// it, one size beyond them; otherwise there is a jump, and the last size measured on the left is the last known to
// belong there.
int64_t breakpoint_bytes(std::span<const FitPoint> points, size_t first_right, const LinkLine& left,
                         const LinkLine& right) {
  const double crossing_bytes =
      (right.alpha_ns - left.alpha_ns) / (left.beta_ns_per_byte - right.beta_ns_per_byte);  // NaN where parallel
  // Grouped sizes may lie between bytes; whole ones keep the ends of pieces different.
  const bool close = crossing_bytes > std::ceil(points[first_right - 2].size_bytes) &&
                     crossing_bytes < std::floor(points[first_right + 1].size_bytes);
  return static_cast<int64_t>(close ? crossing_bytes : points[first_right - 1].size_bytes);
}

// Appends a piece; where it would begin below the level of the one before, that level continues until the line reaches
// it.
void append_monotone(OpCost& cost, const LinkLine& line, int64_t up_to_bytes) {
  if (!cost.pieces.empty()) {
    const int64_t begin_bytes = cost.pieces.back().up_to_bytes;
    GC_CHECK(up_to_bytes > begin_bytes);
    const double level_ns = cost.cost_ns(begin_bytes);
    const OpCost above = linear_cost(line);
    // A fall of a rounding is none, as in check_link.
    if (above.cost_ns(begin_bytes + 1) < level_ns * (1 - 1e-12)) {
      const int64_t reached_bytes = above.capacity_bytes(level_ns);
      const bool always = reached_bytes >= std::min(up_to_bytes, kBytesMax);
      cost.pieces.push_back({always ? up_to_bytes : reached_bytes, level_ns, 0});
      if (always) return;
    }
  }
  cost.pieces.push_back({up_to_bytes, line.alpha_ns, line.beta_ns_per_byte});
}

OpCost cost_of(std::span<const FitPoint> points, const LinkFitOptions& options) {
  const std::vector<Segment> segments = best_segments(points, options);
  std::vector<LinkLine> lines;
  for (const Segment& segment : segments) {
    lines.push_back(fit_line(points.subspan(segment.first, segment.last - segment.first), options.method));
  }
  OpCost cost;
  for (size_t i = 0; i < segments.size(); ++i) {
    const bool last = i + 1 == segments.size();
    const int64_t up_to_bytes =
        last ? kUnboundedBytes : breakpoint_bytes(points, segments[i].last, lines[i], lines[i + 1]);
    append_monotone(cost, lines[i], up_to_bytes);
  }
  return cost;
}

}  // namespace

LinkFit fit_op_cost(std::span<const LinkSample> samples, const LinkFitOptions& options) {
  if (options.max_pieces < 1 || options.max_pieces > kPiecesMax) {
    throw Error(ErrorCode::kInvalidOption,
                "max_pieces is " + std::to_string(options.max_pieces) + "; it must be from 1 to 8");
  }
  check_samples(samples);
  const std::vector<LinkSample> by_size = sorted(samples);
  LinkFit fit;
  fit.cost = cost_of(points_of(by_size, options.method), options);
  std::vector<double> errors;
  for (const LinkSample& sample : by_size) {
    errors.push_back(std::abs(fit.cost.cost_ns(sample.size_bytes) - sample.time_ns) / sample.time_ns);
  }
  fit.relative_error_max = *std::max_element(errors.begin(), errors.end());
  fit.relative_error_median = median_of(errors);
  return fit;
}

}  // namespace gradcast
