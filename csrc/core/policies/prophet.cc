// prophet: gradients become ready in bursts, so the bytes that fit into the gap before the next burst are sent as one
// block.
//
// During backward, when a burst is complete, the most urgent bytes of everything that waits are sent, as many as the
// link carries until the next (more urgent) burst; the rest sinks and competes again after that burst. So a less
// urgent block is gone, by the prediction, when the more urgent gradients appear. After the last burst: strict
// priority with a credit.
//
// Source: Zhang et al., "Prophet: Speeding up Distributed DNN Training with Predictable Communication Scheduling"
// (ICPP 2021); scheduled_queue.cc of the authors' code for what the paper leaves open.
//
// The paper's rules: a gap between consecutive ready times above twice the mean gap ends a burst. The budget is gap
// times bandwidth, without the start-up cost; whole partitions are taken until the next one does not fit. The
// bandwidth is the best ever observed, here one byte per smallest beta of the link.
//
// Choices, each in favour of the paper:
// * The gap of the budget runs from one complete burst to the next complete burst. With the paper's bursts, which take
//   no time, that is the gap between them; where a burst takes time, the link would idle through it otherwise.
// * The bytes that fit are one fused operation (per buffer), as the paper says; its code pushes partitions one by one,
//   which a parameter server pipelines and an all-reduce pays for.
// * After the last burst everything is ready, so a credit cannot change the order any more. What it does for the paper
//   is to keep many small messages in flight at once: here consecutive partitions that fit into `credit_bytes` share
//   one operation. The paper sets the credit by hand; the default 0 takes the best of kCreditsBytes.
// * A profile without a burst boundary (all gaps alike) would send nothing before backward ends; there every ready
//   instant counts as a burst.
// * The code's stalls, its constants for one model and its rounding of the batch size are omitted.
#include <algorithm>
#include <iterator>
#include <limits>
#include <string>

#include "policies/online.h"
#include "policies/published.h"

namespace gradcast {
namespace {

// From four times ByteScheduler's credit to a quarter of its partition, then no fusion at all. Of equals the largest
// wins: fewer blocks.
constexpr int64_t kCreditsBytes[] = {64'000'000, 16'000'000, 4'000'000, 1'000'000, 1};

double ready_at(const Problem& problem, std::span<const int32_t> arrivals, size_t position) {
  return problem.ready_ns[arrivals[position]];
}

// Where a burst begins that ends at each gap above `boundary_ns`.
std::vector<int32_t> starts_after(const Problem& problem, std::span<const int32_t> arrivals, double boundary_ns) {
  std::vector<int32_t> starts = {0};
  for (size_t i = 1; i < arrivals.size(); ++i) {
    if (ready_at(problem, arrivals, i) - ready_at(problem, arrivals, i - 1) > boundary_ns) {
      starts.push_back(static_cast<int32_t>(i));
    }
  }
  return starts;
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
    starts = starts_after(problem, arrivals, 0);  // every instant at which a tensor becomes ready
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
  const double span_ns = ready_at(problem, arrivals, arrivals.size() - 1) - ready_at(problem, arrivals, 0);
  const auto gap_count = static_cast<double>(std::max<size_t>(1, arrivals.size() - 1));
  return starts_after(problem, arrivals, gap_factor * span_ns / gap_count);
}

std::vector<Block> prophet(const Problem& problem, const ProphetOptions& options) {
  check_block_count(unit_count(problem, options.partition_bytes), "partition_bytes");
  const std::vector<int32_t> arrivals = by_ready(problem);
  ReadyQueue queue(problem, arrivals);
  const std::vector<Block> backward = backward_blocks(problem, arrivals, queue, options);
  queue.admit_all();
  const std::vector<Piece> partitions =
      take_prefix(problem, queue, options.partition_bytes, std::numeric_limits<double>::infinity());
  Fastest fastest(problem);
  for (const int64_t credit_bytes : sizes_to_try(options.credit_bytes, kCreditsBytes)) {
    std::vector<Block> blocks = backward;
    append(blocks, forward_blocks(problem, partitions, credit_bytes));
    fastest.consider(std::move(blocks));
  }
  return fastest.best().blocks;
}

}  // namespace gradcast
