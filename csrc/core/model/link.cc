#include "gradcast/link.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "gradcast/error.h"

namespace gradcast {
namespace {

double line_ns(const LinkPiece& piece, int64_t size_bytes) {
  return piece.alpha_ns + piece.beta_ns_per_byte * static_cast<double>(size_bytes);
}

[[noreturn]] void refuse(const std::string& field, const std::string& fault) {
  throw Error(ErrorCode::kInvalidLink, field + " " + fault);
}

// Costs stay at or below 2^53 (104 days, or 9 million seconds per byte): far above any link, and low enough for every
// sum and product of the planner to be finite.
constexpr double kCostMax = static_cast<double>(kBytesMax);
constexpr size_t kPiecesMax = 1000;

void check_number(const std::string& field, double value) {
  if (std::isnan(value)) refuse(field, "is not a number; measure it again");
  if (value < 0) refuse(field, "is " + number_text(value) + "; a cost is never negative, use 0 for a free one");
  if (value > kCostMax) refuse(field, "is " + number_text(value) + "; it must be at most 2^53 nanoseconds");
}

void check_end(const std::string& field, const std::vector<LinkPiece>& pieces, size_t index) {
  const int64_t end_bytes = pieces[index].up_to_bytes;
  if (index + 1 == pieces.size()) {
    if (end_bytes != kUnboundedBytes) {
      refuse(field, "is " + std::to_string(end_bytes) + "; the last piece has no end, use null");
    }
    return;
  }
  if (end_bytes == kUnboundedBytes) refuse(field, "is missing; only the last piece has no end");
  const int64_t begin_bytes = index == 0 ? 0 : pieces[index - 1].up_to_bytes;
  if (end_bytes <= begin_bytes) {
    refuse(field, "is " + std::to_string(end_bytes) + "; it must be above " + std::to_string(begin_bytes) +
                      ", where the piece begins");
  }
  if (end_bytes > kBytesMax) refuse(field, "is " + std::to_string(end_bytes) + "; it must be at most 2^53");
}

// Rounding of a cost that is continuous at its breakpoint may leave the right side below the left one by this much.
constexpr double kRelativeRounding = 1e-12;

void check_breakpoint(const std::string& field, const LinkPiece& left, const LinkPiece& right) {
  const double left_ns = line_ns(left, left.up_to_bytes);
  const double right_ns = line_ns(right, left.up_to_bytes + 1);
  if (right_ns >= left_ns * (1 - kRelativeRounding)) return;
  refuse(field, "is " + number_text(right.alpha_ns) + ", so the cost falls from " + number_text(left_ns) + " ns at " +
                    std::to_string(left.up_to_bytes) + " bytes to " + number_text(right_ns) +
                    " ns one byte above; a larger operation must not cost less, raise it by at least " +
                    number_text(left_ns - right_ns));
}

void check_cost(const std::string& field, const OpCost& cost) {
  // Planning looks at all pieces for every block.
  if (cost.pieces.size() > kPiecesMax)
    refuse(field, "has " + std::to_string(cost.pieces.size()) + " pieces; at most " + std::to_string(kPiecesMax) +
                      " are expected, and three fit most networks");
  for (size_t i = 0; i < cost.pieces.size(); ++i) {
    const std::string piece_field = field + "[" + std::to_string(i) + "]";
    check_end(piece_field + ".up_to_bytes", cost.pieces, i);
    check_number(piece_field + ".alpha_ns", cost.pieces[i].alpha_ns);
    check_number(piece_field + ".beta_ns_per_byte", cost.pieces[i].beta_ns_per_byte);
    if (i > 0) check_breakpoint(piece_field + ".alpha_ns", cost.pieces[i - 1], cost.pieces[i]);
  }
}

OpCost scaled(OpCost cost, double alpha_factor, double beta_factor) {
  const LinkPiece* previous = nullptr;
  for (LinkPiece& piece : cost.pieces) {
    piece.alpha_ns *= alpha_factor;
    piece.beta_ns_per_byte *= beta_factor;
    if (previous != nullptr) {
      const double fall_ns = line_ns(*previous, previous->up_to_bytes) - line_ns(piece, previous->up_to_bytes + 1);
      piece.alpha_ns += std::max(fall_ns, 0.0);
    }
    previous = &piece;
  }
  return cost;
}

// The largest size in [first_bytes, last_bytes] that a piece carries in duration_ns. REQUIRES: the first one fits.
int64_t piece_capacity_bytes(const LinkPiece& piece, int64_t first_bytes, int64_t last_bytes, double duration_ns) {
  int64_t fits_bytes = first_bytes;
  int64_t exceeds_bytes = last_bytes + 1;
  const double quotient = (duration_ns - piece.alpha_ns) / piece.beta_ns_per_byte;  // infinite or NaN where beta is 0
  int64_t probe_bytes = quotient < static_cast<double>(last_bytes) ? static_cast<int64_t>(quotient) : last_bytes;
  // The quotient is a few roundings off, so a look at its neighbours usually ends the search; where alpha swallows the
  // bytes' share of the sum the steps double, and once they leave the bracket it is halved.
  for (int64_t step_bytes = 1; exceeds_bytes - fits_bytes > 1; step_bytes = std::min(2 * step_bytes, kBytesMax)) {
    if (probe_bytes <= fits_bytes || probe_bytes >= exceeds_bytes) {
      probe_bytes = fits_bytes + (exceeds_bytes - fits_bytes) / 2;
    }
    if (line_ns(piece, probe_bytes) <= duration_ns) {
      fits_bytes = probe_bytes;
      probe_bytes += step_bytes;
    } else {
      exceeds_bytes = probe_bytes;
      probe_bytes -= step_bytes;
    }
  }
  return fits_bytes;
}

// A point of a cost's graph.
struct Point {
  double size_bytes;
  double cost_ns;
};

// The ends of every piece within 1 … size_bytes_max: between them the cost is straight.
std::vector<Point> corners(const OpCost& cost, int64_t size_bytes_max) {
  std::vector<Point> points;
  int64_t first_bytes = 1;
  for (const LinkPiece& piece : cost.pieces) {
    const int64_t last_bytes = std::min(piece.up_to_bytes, size_bytes_max);
    if (first_bytes > last_bytes) break;
    for (int64_t size_bytes : {first_bytes, last_bytes}) {
      points.push_back({static_cast<double>(size_bytes), cost.cost_ns(size_bytes)});
    }
    if (first_bytes == last_bytes) points.pop_back();
    first_bytes = last_bytes + 1;
  }
  return points;
}

double slope_between(const Point& left, const Point& right) {
  return (right.cost_ns - left.cost_ns) / (right.size_bytes - left.size_bytes);
}

// The lower convex hull of points ascending in size: slopes rise from vertex to vertex.
std::vector<Point> lower_hull(const std::vector<Point>& points) {
  std::vector<Point> hull;
  for (const Point& point : points) {
    while (hull.size() >= 2 && slope_between(hull[hull.size() - 2], hull.back()) >= slope_between(hull.back(), point)) {
      hull.pop_back();
    }
    hull.push_back(point);
  }
  return hull;
}

// The highest line of a slope below all points. It is lowered by a few roundings of the largest cost, so that the sum
// alpha + beta * bytes stays below the cost in floating point as well.
LinkLine supporting_line(const std::vector<Point>& points, double slope) {
  double alpha_ns = std::numeric_limits<double>::infinity();
  for (const Point& point : points)
    alpha_ns = std::min(alpha_ns, point.cost_ns - slope * point.size_bytes);
  const double rounding_ns = 4 * std::numeric_limits<double>::epsilon() * points.back().cost_ns;
  return {alpha_ns - rounding_ns, slope};
}

// The steepest line through the origin below all points.
LinkLine line_through_origin(const std::vector<Point>& points) {
  double slope = std::numeric_limits<double>::infinity();
  for (const Point& point : points)
    slope = std::min(slope, point.cost_ns / point.size_bytes);
  return {0, slope * (1 - 4 * std::numeric_limits<double>::epsilon())};
}

// Lines of the hull with the mean of each two neighbours between them: below the cost as they are, and a bound is not
// convex in the line. On 300 random convex costs of two pieces one mean raised T* by up to 0.57 % in 4 % of the cases;
// three means per pair gained no more.
std::vector<LinkLine> with_means(const std::vector<LinkLine>& lines) {
  std::vector<LinkLine> result;
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) {
      result.push_back({(lines[i - 1].alpha_ns + lines[i].alpha_ns) / 2,
                        (lines[i - 1].beta_ns_per_byte + lines[i].beta_ns_per_byte) / 2});
    }
    result.push_back(lines[i]);
  }
  return result;
}

}  // namespace

const LinkPiece& OpCost::piece(int64_t size_bytes) const {
  GC_CHECK(available());
  const auto ends_before = [size_bytes](const LinkPiece& piece) { return piece.up_to_bytes < size_bytes; };
  const auto found = std::partition_point(pieces.begin(), pieces.end(), ends_before);
  GC_CHECK(found != pieces.end());
  return *found;
}

double OpCost::cost_ns(int64_t size_bytes) const {
  return line_ns(piece(size_bytes), size_bytes);
}

int64_t OpCost::capacity_bytes(double duration_ns) const {
  GC_CHECK(available());
  for (size_t i = pieces.size(); i-- > 0;) {
    const int64_t first_bytes = i == 0 ? 1 : pieces[i - 1].up_to_bytes + 1;
    if (first_bytes > kBytesMax || !(line_ns(pieces[i], first_bytes) <= duration_ns)) continue;
    return piece_capacity_bytes(pieces[i], first_bytes, std::min(pieces[i].up_to_bytes, kBytesMax), duration_ns);
  }
  return 0;
}

double OpCost::alpha_ns_min() const {
  GC_CHECK(available());
  return std::ranges::min_element(pieces, {}, &LinkPiece::alpha_ns)->alpha_ns;
}

double OpCost::beta_ns_per_byte_min() const {
  GC_CHECK(available());
  return std::ranges::min_element(pieces, {}, &LinkPiece::beta_ns_per_byte)->beta_ns_per_byte;
}

OpCost linear_cost(const LinkLine& line) {
  return {{{kUnboundedBytes, line.alpha_ns, line.beta_ns_per_byte}}};
}

std::vector<LinkLine> minorants(const OpCost& cost, int64_t size_bytes_max) {
  GC_CHECK(cost.available() && size_bytes_max >= 1);
  // The line that holds all sizes is its own best minorant, to the last bit.
  const LinkPiece& first = cost.pieces.front();
  if (first.up_to_bytes >= size_bytes_max) return {{first.alpha_ns, first.beta_ns_per_byte}};

  GC_CHECK(size_bytes_max <= kBytesMax);  // above it a size is no longer exact as a double
  const std::vector<Point> points = corners(cost, size_bytes_max);
  const std::vector<Point> hull = lower_hull(points);
  std::vector<LinkLine> lines;
  for (size_t i = 1; i < hull.size(); ++i) {
    const LinkLine line = supporting_line(points, std::max(0.0, slope_between(hull[i - 1], hull[i])));
    // Steeper edges start lower still. Among lines of alpha 0 the one through the origin is the best.
    if (line.alpha_ns < 0) {
      lines.push_back(line_through_origin(points));
      break;
    }
    lines.push_back(line);
  }
  return with_means(lines);
}

void check_link(const LinkModel& link) {
  if (!link.all_reduce.available()) refuse("link.all_reduce", "is missing; give it at least one piece");
  for (const Op op : kOps) {
    check_cost("link." + std::string(to_string(op)), link.of(op));
  }
  check_number("link.pack_ns_per_byte", link.pack_ns_per_byte);
}

LinkModel scaled(const LinkModel& link, double alpha_factor, double beta_factor) {
  LinkModel result = link;
  for (const Op op : kOps) {
    result.of(op) = scaled(std::move(result.of(op)), alpha_factor, beta_factor);
  }
  result.pack_ns_per_byte *= beta_factor;
  return result;
}

}  // namespace gradcast
