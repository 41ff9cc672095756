// dcredit: every gap between two gradients gets a credit of its own: the units that the link carries in it, start-up
// cost included in the budget.
//
// In the slot between two consecutive ready times the most urgent units of what is ready are sent, as many as are
// needed to fill what is left of the slot; after the last gradient everything that is left goes tensor by tensor, most
// urgent first. The closest published relative of prophet on all-reduce.
//
// Source: D-Credit (IEEE TNSE 2025); Get_Credit and D_Credit of the authors' code (ZJU-CNLAB/D-Credit).
//
// The rules of the code: a slot too short for the start-up cost still sends one unit; otherwise the number of units is
// rounded up, so a slot may be overrun by less than one unit, and the next slot is shorter by that.
//
// Choices: the units of one slot are one operation (per buffer), since the rule counts one start-up per slot; a
// cost that is piecewise is inverted as it is. The model has one operation at a time, for any in_flight. The size
// of a unit is ByteScheduler's partition, which the authors tune; the default 0 takes the best of kUnitsBytes.
#include <algorithm>
#include <string>

#include "policies/online.h"
#include "policies/published.h"

namespace gradcast {
namespace {

// The most urgent units that fill a slot in which an operation of capacity_bytes would end; one unit if not even a byte
// would.
std::vector<Piece> slot_units(const Problem& problem, ReadyQueue& queue, int64_t unit_bytes, int64_t capacity_bytes) {
  std::vector<Piece> pieces;
  do {
    const int64_t unit = whole_elements_bytes(problem, queue.top().tensor, unit_bytes);
    const int64_t unit_count = std::max(int64_t{1}, (capacity_bytes - 1) / unit + 1);
    pieces.push_back(queue.take(unit_count * unit));
    capacity_bytes -= pieces.back().size_bytes();
  } while (capacity_bytes > 0 && !queue.empty());
  return pieces;
}

std::vector<Block> with_unit(const Problem& problem, const std::vector<int32_t>& arrivals, int64_t unit_bytes) {
  std::vector<Block> blocks;
  ReadyQueue queue(problem, arrivals);
  double free_ns = problem.ready_ns[arrivals.front()];
  for (size_t at = 0; at + 1 < arrivals.size(); ++at) {
    const double next_ready_ns = problem.ready_ns[arrivals[at + 1]];
    queue.admit(problem.ready_ns[arrivals[at]]);
    if (next_ready_ns > free_ns && !queue.empty()) {
      const int64_t capacity_bytes = problem.link.all_reduce.capacity_bytes(next_ready_ns - free_ns);
      const std::vector<Piece> units = slot_units(problem, queue, unit_bytes, capacity_bytes);
      for (Block& block : joint_blocks(problem, units, "fills slot " + std::to_string(at + 1))) {
        free_ns += block_cost(problem.link, block).total_ns();
        blocks.push_back(std::move(block));
      }
    }
    free_ns = std::max(free_ns, next_ready_ns);
  }
  queue.admit_all();
  while (!queue.empty()) {
    const Piece rest = queue.take(queue.top().size_bytes());
    blocks.push_back(piece_block(problem, rest, "most urgent"));
  }
  return blocks;
}

}  // namespace

std::vector<Block> dcredit(const Problem& problem, const DcreditOptions& options) {
  const std::vector<int32_t> arrivals = by_ready(problem);
  Fastest fastest(problem);
  for (const int64_t unit_bytes : sizes_to_try(options.unit_bytes, kUnitsBytes)) {
    fastest.consider(with_unit(problem, arrivals, unit_bytes));
  }
  return fastest.best().blocks;
}

}  // namespace gradcast
