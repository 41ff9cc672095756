// usbyte: blocks of unequal size: what one tensor sends without a break is one operation, as long as the time until
// the next gradient allows; a tensor that is nearly through is not interrupted.
//
// Phase 1 (backward): whenever the link is free before the next ready time, the tensor of the highest priority sends
// as many units as fit until then (at least one; rounded up), and where it goes on sending its block grows. Phase 2
// (after the last gradient): what is left of each tensor is one block, most urgent first. A local search then raises,
// one by one, the priority of tensors that others interrupted in phase 1, and keeps what shortens the iteration.
//
// Source: US-Byte (IEEE TPDS 2024), algorithms 1 to 3; algorithm1, algorithm3 of the authors' code
// (ZJU-CNLAB/US-Byte).
//
// Choices: where a block grows, its size is what fits between its own start and the next ready time, with one start-up
// cost (the code counts the units before the last growth only once). The search compares predicted iteration times
// with this library's rules. It makes at most as many trials as play two million tensors in all: profiles above 1,400
// tensors with many interruptions get a part of it. The model has one operation at a time, for any in_flight. The
// unit is ByteScheduler's tuned partition in the paper; the default 0 takes the best of kUnitsBytes,
// before the search.
#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "policies/online.h"
#include "policies/published.h"

namespace gradcast {
namespace {

// Tensors played in the local search: about a quarter of a second.
constexpr int64_t kSearchTensors = 2'000'000;
constexpr double kNever = -1;

struct Schedule {
  std::vector<Piece> pieces;     // each one block
  size_t backward_count = 0;     // those of phase 1
  std::vector<double> begin_ns;  // by tensor: start of its first block in phase 1, or kNever
  double iteration_ns = std::numeric_limits<double>::infinity();
};

// Phase 1 as it unfolds: the blocks so far, and when the link is free again.
class Backward {
 public:
  Backward(const Problem& problem, ReadyQueue& queue, int64_t unit_bytes, Schedule& schedule)
      : problem_(problem), queue_(queue), unit_bytes_(unit_bytes), schedule_(schedule) {}

  // Fills the link from now_ns (or where it is free) until the next ready time, or until nothing is left.
  void fill(double now_ns, double next_ready_ns) {
    free_ns_ = std::max(free_ns_, now_ns);
    while (free_ns_ < next_ready_ns && !queue_.empty()) {
      // A tensor that has a rest and goes on right behind itself grows its block.
      if (schedule_.pieces.empty() || schedule_.pieces.back().tensor != queue_.top().tensor) {
        open(queue_.top());
      }
      send(next_ready_ns);
    }
  }

 private:
  void open(const Piece& rest) {
    schedule_.pieces.push_back({rest.tensor, rest.from_bytes, rest.from_bytes});
    double& begin_ns = schedule_.begin_ns[rest.tensor];
    begin_ns = begin_ns == kNever ? free_ns_ : begin_ns;
    block_begin_ns_ = free_ns_;
  }

  void send(double next_ready_ns) {
    Piece& block = schedule_.pieces.back();
    const int64_t unit = whole_elements_bytes(problem_, block.tensor, unit_bytes_);
    const int64_t capacity_bytes =
        problem_.link.all_reduce.capacity_bytes(next_ready_ns - block_begin_ns_) - block.size_bytes();
    const int64_t unit_count = std::max(int64_t{1}, (capacity_bytes - 1) / unit + 1);
    block.to_bytes = queue_.take(unit_count * unit).to_bytes;
    free_ns_ = block_begin_ns_ + problem_.link.all_reduce.cost_ns(block.size_bytes());
  }

  const Problem& problem_;
  ReadyQueue& queue_;
  int64_t unit_bytes_;
  Schedule& schedule_;
  double free_ns_ = 0;
  double block_begin_ns_ = 0;
};

// Algorithms 1 and 2 of the paper, for one order of priorities.
Schedule schedule_for(const Problem& problem, const std::vector<int32_t>& arrivals, const std::vector<int32_t>& rank,
                      int64_t unit_bytes) {
  Schedule schedule;
  schedule.begin_ns.assign(problem.bytes.size(), kNever);
  ReadyQueue queue(problem, arrivals, rank);
  Backward backward(problem, queue, unit_bytes, schedule);
  for (size_t at = 0; at + 1 < arrivals.size(); ++at) {
    const double ready_ns = problem.ready_ns[arrivals[at]];
    queue.admit(ready_ns);
    backward.fill(ready_ns, problem.ready_ns[arrivals[at + 1]]);
  }
  schedule.backward_count = schedule.pieces.size();
  for (int32_t tensor = 0; tensor < problem.tensor_count(); ++tensor) {
    if (queue.sent_bytes(tensor) < problem.bytes[tensor]) {
      schedule.pieces.push_back({tensor, queue.sent_bytes(tensor), problem.bytes[tensor]});
    }
  }
  schedule.iteration_ns = pieces_iteration_ns(problem, schedule.pieces);
  return schedule;
}

// `tensor` moves up to the place of `before`, which and all between move down by one.
std::vector<int32_t> raised(const std::vector<int32_t>& rank, int32_t tensor, int32_t before) {
  std::vector<int32_t> result = rank;
  for (int32_t& place : result) {
    place += place >= rank[before] && place < rank[tensor] ? 1 : 0;
  }
  result[tensor] = rank[before];
  return result;
}

// Algorithm 3: from the first to the last gradient, a tensor that would end after later gradients became ready, had it
// been sent whole from its first block on, is given the priority of the last of those.
void improve(const Problem& problem, const std::vector<int32_t>& arrivals, int64_t unit_bytes,
             std::vector<int32_t> rank, Schedule& best) {
  int64_t trials_left = std::max(int64_t{1}, kSearchTensors / problem.tensor_count());
  for (size_t at = 0; at + 1 < arrivals.size() && trials_left > 0; ++at) {
    const int32_t tensor = arrivals[at];
    if (best.begin_ns[tensor] == kNever) {
      continue;
    }
    const double whole_ns = best.begin_ns[tensor] + problem.link.all_reduce.cost_ns(problem.bytes[tensor]);
    const auto later = std::partition_point(arrivals.begin(), arrivals.end(),
                                            [&](int32_t other) { return problem.ready_ns[other] < whole_ns; });
    const auto overtaken = static_cast<size_t>(later - arrivals.begin()) - 1;
    if (overtaken <= at || rank[arrivals[overtaken]] > rank[tensor]) {
      continue;
    }
    std::vector<int32_t> tried_rank = raised(rank, tensor, arrivals[overtaken]);
    Schedule tried = schedule_for(problem, arrivals, tried_rank, unit_bytes);
    --trials_left;
    if (tried.iteration_ns < best.iteration_ns) {
      best = std::move(tried);
      rank = std::move(tried_rank);
      at = overtaken;  // those between were passed over; the next in line comes after
    }
  }
}

}  // namespace

std::vector<Block> usbyte(const Problem& problem, const UsbyteOptions& options) {
  const std::vector<int32_t> arrivals = by_ready(problem);
  std::vector<int32_t> urgency(problem.bytes.size());
  std::iota(urgency.begin(), urgency.end(), 0);
  Schedule best;
  int64_t best_unit_bytes = 0;
  for (const int64_t unit_bytes : sizes_to_try(options.unit_bytes, kUnitsBytes)) {
    if (Schedule tried = schedule_for(problem, arrivals, urgency, unit_bytes); tried.iteration_ns < best.iteration_ns) {
      best = std::move(tried);
      best_unit_bytes = unit_bytes;
    }
  }
  const bool could_improve = best.iteration_ns > problem.backward_ns + problem.forward_ns;
  if (options.search && could_improve) {
    improve(problem, arrivals, best_unit_bytes, urgency, best);
  }

  std::vector<Block> blocks;
  blocks.reserve(best.pieces.size());
  for (size_t i = 0; i < best.pieces.size(); ++i) {
    blocks.push_back(piece_block(problem, best.pieces[i],
                                 i < best.backward_count ? "fits until the next gradient" : "what is left"));
  }
  return blocks;
}

}  // namespace gradcast
