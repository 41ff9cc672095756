// bytescheduler: tensors are cut into chunks, chunks wait in a priority queue, and a credit says how many bytes may be
// handed to the link before the first of them has come back.
//
// A chunk's priority is its tensor's urgency, then its place in the tensor. The order of a chunk is fixed when it is
// handed over, so a large credit keeps the link busy and a small one lets urgent chunks overtake.
//
// Source: Peng et al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration" (SOSP 2019);
// rules and defaults of the authors' code: a chunk goes while the credit is above 0, so the credit may fall below 0 by
// one chunk; a finished chunk gives its bytes back.
//
// The paper tunes both sizes by Bayesian optimization of the measured step time, over credits of 4 to 64 million and
// partitions of 2 to 32 million parameters; untuned it takes 4 and 1 million. Here the tuner is a search over a grid,
// with the predicted iteration time: the powers of two of that space with 4 bytes per parameter (credits 16, 32, … 256
// MB; partitions 8, 16, … 128 MB) and the untuned values. On a tie the larger partition wins, then the smaller credit.
//
// Choices: an operation is an all-reduce. The credit decides only when the order becomes fixed; the link serves the
// chunks in that order, in_flight at a time.
#include <algorithm>
#include <limits>
#include <queue>
#include <string>

#include "policies/online.h"
#include "policies/published.h"

namespace gradcast {
namespace {

constexpr int64_t kPartitionsBytes[] = {128'000'000, 64'000'000, 32'000'000, 16'000'000, 8'000'000, 4'000'000};
constexpr int64_t kCreditsBytes[] = {16'000'000, 32'000'000, 64'000'000, 128'000'000, 256'000'000};

// The bytes that are handed to the link and have not come back.
class Credit {
 public:
  explicit Credit(int64_t credit_bytes) : left_bytes_(credit_bytes) {}

  bool available() const { return left_bytes_ > 0; }
  // REQUIRES: !available(), so that something is outstanding.
  double next_return_ns() const { return outstanding_.front().finish_ns; }

  void spend(int64_t size_bytes, double finish_ns) {
    left_bytes_ -= size_bytes;
    outstanding_.push({finish_ns, size_bytes});
  }
  void collect(double now_ns) {
    while (!outstanding_.empty() && outstanding_.front().finish_ns <= now_ns) {
      left_bytes_ += outstanding_.front().size_bytes;
      outstanding_.pop();
    }
  }

 private:
  struct Chunk {
    double finish_ns;
    int64_t size_bytes;
  };
  int64_t left_bytes_;
  std::queue<Chunk> outstanding_;  // in launch order, which is the order of their finishes
};

// The scheduler, played: the chunks in the order in which they are handed to the link.
std::vector<Piece> chunk_order(const Problem& problem, const std::vector<int32_t>& arrivals,
                               const ByteschedulerOptions& options) {
  std::vector<Piece> order;
  ReadyQueue queue(problem, arrivals);
  VirtualLink link(problem);
  Credit credit(options.credit_bytes);
  double now_ns = 0;
  while (!queue.finished()) {
    if (queue.empty()) {
      now_ns = std::max(now_ns, queue.next_ready_ns());
    } else if (!credit.available()) {
      now_ns = std::max(now_ns, credit.next_return_ns());
    }
    credit.collect(now_ns);
    queue.admit(now_ns);
    while (!queue.empty() && credit.available()) {
      const int64_t chunk_bytes = whole_elements_bytes(problem, queue.top().tensor, options.partition_bytes);
      order.push_back(queue.take(chunk_bytes));
      credit.spend(order.back().size_bytes(), link.launch(now_ns, order.back().size_bytes()));
    }
  }
  return order;
}

// sizes_to_try() less those from `limit_bytes` on, which all do the same: the smallest of them stays in.
std::vector<int64_t> candidates(int64_t given_bytes, std::span<const int64_t> grid_bytes, int64_t limit_bytes) {
  std::vector<int64_t> values = sizes_to_try(given_bytes, grid_bytes);
  int64_t smallest_above_bytes = std::numeric_limits<int64_t>::max();
  for (const int64_t value : values) {
    smallest_above_bytes = value >= limit_bytes ? std::min(smallest_above_bytes, value) : smallest_above_bytes;
  }
  std::erase_if(values, [&](int64_t value) { return value > smallest_above_bytes; });
  return values;
}

struct Tuned {
  ByteschedulerOptions options;
  std::vector<Piece> order;
};

Tuned tuned(const Problem& problem, const ByteschedulerOptions& options) {
  const std::vector<int32_t> arrivals = by_ready(problem);
  const int64_t largest_bytes = *std::max_element(problem.bytes.begin(), problem.bytes.end());
  Tuned best;
  double best_ns = std::numeric_limits<double>::infinity();
  for (const int64_t partition_bytes : candidates(options.partition_bytes, kPartitionsBytes, largest_bytes)) {
    const double count = unit_count(problem, partition_bytes);
    if (count > kBlockCountMax && !best.order.empty()) {
      break;  // a larger partition will do, and the following are smaller still
    }
    check_block_count(count, "partition_bytes");
    for (const int64_t credit_bytes : candidates(options.credit_bytes, kCreditsBytes, problem.total_bytes)) {
      const ByteschedulerOptions tried{partition_bytes, credit_bytes};
      std::vector<Piece> order = chunk_order(problem, arrivals, tried);
      const double iteration_ns = pieces_iteration_ns(problem, order);
      if (iteration_ns < best_ns) {
        best_ns = iteration_ns;
        best = {tried, std::move(order)};
      }
    }
  }
  return best;
}

}  // namespace

std::vector<Block> bytescheduler(const Problem& problem, const ByteschedulerOptions& options) {
  const Tuned best = tuned(problem, options);
  const std::string reason = "most urgent; partition " + bytes_text(best.options.partition_bytes) + ", credit " +
                             bytes_text(best.options.credit_bytes);
  std::vector<Block> blocks;
  blocks.reserve(best.order.size());
  for (const Piece& chunk : best.order) {
    blocks.push_back(piece_block(problem, chunk, reason));
  }
  return blocks;
}

}  // namespace gradcast
