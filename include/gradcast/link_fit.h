// Measured costs: from (size, time) samples of one kind of operation to alpha and beta.
//
// Errors are judged relative to the time, as a plan feels them: fitted by absolute error, the largest operations decide
// the line and the small ones, of which a plan may have more, are off by any factor. Several pieces are used where one
// line does not fit, since libraries change algorithm with the size; samples should therefore reach from the smallest
// to the largest block that a plan may send (4 KB to 256 MB), not only over a range in which one algorithm is at work.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <span>

#include "gradcast/link.h"

namespace gradcast {

struct LinkSample {
  int64_t size_bytes = 0;
  double time_ns = 0;  // of the whole operation
};

enum class FitMethod {
  // Medians: P. K. Sen, "Estimates of the regression coefficient based on Kendall's tau", J. Am. Stat. Assoc. 63 (1968),
  // after H. Theil, with pairs weighted by how well they show the slope. Up to a quarter of the samples may be anything,
  // such as those taken while a host was busy.
  kRobust,
  // The smallest sum of squared relative errors: the better estimate where no sample is an outlier.
  kLeastSquares,
};

struct LinkFitOptions {
  FitMethod method = FitMethod::kRobust;
  int32_t max_pieces = 3;  // 1 … 8
};

struct LinkFit {
  OpCost cost;  // passes check_link
  // |cost - time| / time over all samples, outliers included.
  double relative_error_median = 0;
  double relative_error_max = 0;
};

// Fits the cost with the number of pieces that the samples justify. The pieces and their breakpoints minimise the total
// error (dynamic programming over the sizes, each piece at least three different ones), the number of pieces the
// Bayesian information criterion (G. Schwarz, Ann. Stat. 6 (1978)). alpha and beta are never negative. Where a fit
// falls at a breakpoint it stays level until the piece above reaches it: this may take one piece more than max_pieces
// for each such place.
//
// Deterministic; the order of the samples does not count. O(n log n) in the samples: more than 48 sizes are grouped.
// Throws Error{kInvalidLink}: fewer than three different sizes, a size or time that is not positive and finite;
// Error{kInvalidOption}: max_pieces.
LinkFit fit_op_cost(std::span<const LinkSample> samples, const LinkFitOptions& options = {});

}  // namespace gradcast
