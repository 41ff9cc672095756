// The link model: what a collective operation of a given size costs.
//
// A cost is piecewise linear, `alpha + beta * bytes`, because networks switch algorithm and protocol with the size. The
// three kinds of operation have costs of their own: on Gloo a reduce-scatter costs more than a whole all-reduce.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gradcast/types.h"

namespace gradcast {

inline constexpr int64_t kUnboundedBytes = std::numeric_limits<int64_t>::max();

// One line of a cost: applies to sizes above the previous piece's `up_to_bytes` and up to its own, inclusive.
struct LinkPiece {
  int64_t up_to_bytes = kUnboundedBytes;
  double alpha_ns = 0;
  double beta_ns_per_byte = 0;
  std::string extra_json{};  // unknown fields of the JSON object, kept; "" if none

  bool operator==(const LinkPiece&) const = default;
};

// The cost of one kind of operation. Empty: the kind is not available on this link.
struct OpCost {
  std::vector<LinkPiece> pieces;  // ascending up_to_bytes, the last unbounded; the cost never falls with the size

  bool available() const { return !pieces.empty(); }
  bool linear() const { return pieces.size() == 1; }
  // The first piece that holds the size. REQUIRES: available().
  const LinkPiece& piece(int64_t size_bytes) const;
  double cost_ns(int64_t size_bytes) const;
  // The most bytes that an operation of at most `duration_ns` carries; 0 if not even one byte fits.
  int64_t capacity_bytes(double duration_ns) const;
  double alpha_ns_min() const;
  double beta_ns_per_byte_min() const;

  bool operator==(const OpCost&) const = default;
};

// A line below a cost everywhere: alpha_ns + beta_ns_per_byte * bytes <= cost_ns(bytes) for every size in 1 …
// size_bytes_max.
struct LinkLine {
  double alpha_ns = 0;
  double beta_ns_per_byte = 0;
};
// A cost of that one line.
OpCost linear_cost(const LinkLine& line);

// The supporting lines of the cost over sizes 1 … size_bytes_max: those of its lower convex hull, alpha never negative,
// and the mean of each two neighbours. Where one piece holds all sizes, that piece alone. Any of them gives a valid
// lower bound for plans on this cost; a bound formula applied to the pieces themselves does not. REQUIRES:
// cost.available(), 1 <= size_bytes_max <= kBytesMax.
std::vector<LinkLine> minorants(const OpCost& cost, int64_t size_bytes_max);

struct LinkModel {
  OpCost all_reduce;
  OpCost reduce_scatter;
  OpCost all_gather;
  double pack_ns_per_byte = 0;  // added to beta for a block of more than one range: it is packed and unpacked
  std::string extra_json{};     // unknown fields of the JSON object, kept; "" if none

  const OpCost& of(Op op) const {
    return op == Op::kAllReduce ? all_reduce : op == Op::kReduceScatter ? reduce_scatter : all_gather;
  }
  // True if it has both operations that together make an all-reduce.
  bool can_scatter_gather() const { return reduce_scatter.available() && all_gather.available(); }
  OpCost& of(Op op) { return const_cast<OpCost&>(std::as_const(*this).of(op)); }
  bool operator==(const LinkModel&) const = default;
};

// Throws Error{kInvalidLink} that names the first wrong field: costs that are negative, NaN or above 2^53, pieces out
// of order, a last piece with an end, a cost that falls at a breakpoint, no all_reduce.
void check_link(const LinkModel& link);

// Every cost of the link multiplied: alpha by `alpha_factor`, beta (and packing) by `beta_factor`. A cost that would
// fall at a breakpoint by it has the alpha of the piece above raised, so that the result passes check_link where `link`
// does.
LinkModel scaled(const LinkModel& link, double alpha_factor, double beta_factor);

}  // namespace gradcast
