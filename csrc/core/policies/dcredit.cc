#include "policies/dcredit.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <string>

#include "policies/online.h"

namespace gradcast {
namespace {

// ByteScheduler's untuned partition, its relatives, and one fine enough for the fastest gaps.
constexpr int64_t kUnitsBytes[] = {16'000'000, 4'000'000, 1'000'000, 250'000};

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
  if (options.unit_bytes > 0) {
    return with_unit(problem, arrivals, options.unit_bytes);
  }
  std::vector<Block> best;
  double best_ns = std::numeric_limits<double>::infinity();
  for (const int64_t unit_bytes : kUnitsBytes) {
    std::vector<Block> blocks = with_unit(problem, arrivals, unit_bytes);
    if (const double tried_ns = iteration_ns(problem, blocks); tried_ns < best_ns) {
      best_ns = tried_ns;
      best = std::move(blocks);
    }
  }
  return best;
}

}  // namespace gradcast
