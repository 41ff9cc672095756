#include "policies/prophet.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <string>

#include "policies/online.h"

namespace gradcast {
namespace {

// No fusion at all, then from a quarter of ByteScheduler's partition to four times its credit.
constexpr int64_t kCreditsBytes[] = {1, 1'000'000, 4'000'000, 16'000'000, 64'000'000};

double ready_at(const Problem& problem, std::span<const int32_t> arrivals, size_t position) {
  return problem.ready_ns[arrivals[position]];
}

// Every instant at which a tensor becomes ready as a burst of its own.
std::vector<int32_t> instant_starts(const Problem& problem, std::span<const int32_t> arrivals) {
  std::vector<int32_t> starts = {0};
  for (size_t i = 1; i < arrivals.size(); ++i) {
    if (ready_at(problem, arrivals, i) > ready_at(problem, arrivals, i - 1)) {
      starts.push_back(static_cast<int32_t>(i));
    }
  }
  return starts;
}

Piece next_partition(const Problem& problem, ReadyQueue& queue, int64_t partition_bytes) {
  return queue.take(whole_elements_bytes(problem, queue.top().tensor, partition_bytes));
}

// The most urgent partitions, as many as fit into the budget.
std::vector<Piece> take_prefix(const Problem& problem, ReadyQueue& queue, int64_t partition_bytes,
                               double budget_bytes) {
  std::vector<Piece> pieces;
  while (!queue.empty()) {
    const Piece rest = queue.top();
    const int64_t size_bytes = std::min(rest.size_bytes(), whole_elements_bytes(problem, rest.tensor, partition_bytes));
    if (static_cast<double>(size_bytes) > budget_bytes) {
      break;
    }
    budget_bytes -= static_cast<double>(size_bytes);
    pieces.push_back(queue.take(size_bytes));
  }
  return pieces;
}

void append(std::vector<Block>& blocks, std::vector<Block> more) {
  std::ranges::move(more, std::back_inserter(blocks));
}

// The blocks of backward, one per burst but the last.
std::vector<Block> backward_blocks(const Problem& problem, std::span<const int32_t> arrivals, ReadyQueue& queue,
                                   const ProphetOptions& options) {
  std::vector<int32_t> starts = burst_starts(problem, arrivals, options.gap_factor);
  if (starts.size() == 1) {
    starts = instant_starts(problem, arrivals);
  }
  std::vector<Block> blocks;
  for (size_t burst = 0; burst + 1 < starts.size(); ++burst) {
    const size_t next_end = burst + 2 < starts.size() ? static_cast<size_t>(starts[burst + 2]) : arrivals.size();
    const double complete_ns = ready_at(problem, arrivals, starts[burst + 1] - 1);
    const double gap_ns = ready_at(problem, arrivals, next_end - 1) - complete_ns;
    // Infinite where bytes cost nothing.
    const double budget_bytes = gap_ns / problem.link.all_reduce.beta_ns_per_byte_min();
    queue.admit(complete_ns);
    const std::vector<Piece> pieces = take_prefix(problem, queue, options.partition_bytes, budget_bytes);
    append(blocks, joint_blocks(problem, pieces, "fits before burst " + std::to_string(burst + 2)));
  }
  return blocks;
}

// The blocks after the last burst: partitions in order of urgency, those within one credit together.
std::vector<Block> forward_blocks(const Problem& problem, const std::vector<Piece>& partitions, int64_t credit_bytes) {
  std::vector<Block> blocks;
  size_t first = 0;
  int64_t size_bytes = 0;
  for (size_t at = 0; at <= partitions.size(); ++at) {
    const bool full = at == partitions.size() || size_bytes + partitions[at].size_bytes() > credit_bytes;
    if (full && at > first) {
      append(blocks, joint_blocks(problem, std::span(partitions).subspan(first, at - first), "most urgent, by credit"));
      first = at;
      size_bytes = 0;
    }
    if (at < partitions.size()) {
      size_bytes += partitions[at].size_bytes();
    }
  }
  return blocks;
}

}  // namespace

std::vector<int32_t> burst_starts(const Problem& problem, std::span<const int32_t> arrivals, double gap_factor) {
  std::vector<int32_t> starts = {0};
  if (arrivals.size() < 2) {
    return starts;
  }
  const double span_ns = ready_at(problem, arrivals, arrivals.size() - 1) - ready_at(problem, arrivals, 0);
  const double boundary_ns = gap_factor * span_ns / static_cast<double>(arrivals.size() - 1);
  for (size_t i = 1; i < arrivals.size(); ++i) {
    if (ready_at(problem, arrivals, i) - ready_at(problem, arrivals, i - 1) > boundary_ns) {
      starts.push_back(static_cast<int32_t>(i));
    }
  }
  return starts;
}

std::vector<Block> prophet(const Problem& problem, const ProphetOptions& options) {
  check_block_count(unit_count(problem, options.partition_bytes), "partition_bytes");
  const std::vector<int32_t> arrivals = by_ready(problem);
  ReadyQueue queue(problem, arrivals);
  const std::vector<Block> backward = backward_blocks(problem, arrivals, queue, options);
  queue.admit_all();
  std::vector<Piece> partitions;
  while (!queue.empty()) {
    partitions.push_back(next_partition(problem, queue, options.partition_bytes));
  }

  std::vector<int64_t> credits_bytes(std::begin(kCreditsBytes), std::end(kCreditsBytes));
  if (options.credit_bytes > 0) {
    credits_bytes = {options.credit_bytes};
  }
  std::vector<Block> best;
  double best_ns = std::numeric_limits<double>::infinity();
  for (const int64_t credit_bytes : credits_bytes) {
    std::vector<Block> blocks = backward;
    append(blocks, forward_blocks(problem, partitions, credit_bytes));
    // On a tie the larger credit: fewer blocks.
    if (const double tried_ns = iteration_ns(problem, blocks); tried_ns <= best_ns) {
      best_ns = tried_ns;
      best = std::move(blocks);
    }
  }
  return best;
}

}  // namespace gradcast
