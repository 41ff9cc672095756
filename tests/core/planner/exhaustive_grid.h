// A tiny profile cut into units: the ground on which both exhaustive searches walk.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "tests/core/planner/exhaustive.h"

namespace gradcast {

struct Grid {
  int64_t unit_bytes = 0;
  double backward_ns = 0;
  double forward_ns = 0;  // all updates included
  bool packing_costs = false;
  int32_t in_flight = 1;
  int32_t unit_count = 0;
  int32_t buffer_count = 0;
  // By tensor, in urgency order.
  std::vector<int32_t> units;
  std::vector<int32_t> first_unit;  // units are numbered tensor by tensor
  std::vector<int32_t> buffer;
  std::vector<double> ready_ns;
  std::vector<double> need_ns;  // forward work before the read, updates of more urgent tensors included; 0 in hook mode
  // By unit.
  std::vector<int64_t> offset_bytes;  // in its buffer
  std::vector<int32_t> tensor;
  std::vector<double> cost_ns;  // of an all-reduce, by units in a block

  int32_t tensor_count() const { return static_cast<int32_t>(units.size()); }
  // The iteration ends a fixed time after the later of the end of backward and the greatest lateness, the arrival of a
  // tensor less the forward work before its read: forward either never waits, or its last wait ends with that arrival.
  double iteration_ns(double lateness_ns) const {
    return (lateness_ns < backward_ns ? backward_ns : lateness_ns) + forward_ns;
  }
  // What iteration_ns undoes, with a little room for rounding.
  double lateness_ns_max(double iteration_ns_max) const { return iteration_ns_max * (1 + 1e-12) - forward_ns; }
};

// By definition: the first piece that holds the size applies, its end included.
const LinkPiece& applying_piece(const std::vector<LinkPiece>& pieces, int64_t size_bytes);
double grid_cost_ns(const std::vector<LinkPiece>& pieces, int64_t size_bytes, double pack_ns_per_byte);

Grid make_grid(const Profile& profile, const LinkModel& link, const ExhaustiveOptions& options);

// exhaustive_best() by the second search.
ExhaustivePlan best_by_sets(const Grid& grid, const LinkModel& link, bool any_op);

// A block of these units, which lie in one buffer and ascend.
Block grid_block(const Grid& grid, const std::vector<int32_t>& units);

}  // namespace gradcast
