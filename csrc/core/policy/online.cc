#include "policy/online.h"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <limits>
#include <map>
#include <utility>

#include "gradcast/error.h"

namespace gradcast {

std::vector<int32_t> by_ready(const Problem& problem) {
  std::vector<int32_t> order(problem.bytes.size());
  for (size_t i = 0; i < order.size(); ++i) {
    order[i] = static_cast<int32_t>(order.size() - 1 - i);
  }
  const auto earlier = [&](int32_t a, int32_t b) { return problem.ready_ns[a] < problem.ready_ns[b]; };
  // The usual profile, whose backward mirrors forward, is in order already.
  if (!std::is_sorted(order.begin(), order.end(), earlier)) {
    std::stable_sort(order.begin(), order.end(), earlier);
  }
  return order;
}

double VirtualLink::free_ns() const {
  const auto in_flight = static_cast<size_t>(problem_->in_flight);
  const double credit_ns = finish_ns_.size() >= in_flight ? finish_ns_[finish_ns_.size() - in_flight] : 0;
  return std::max(launch_ns_, credit_ns);
}

double VirtualLink::launch(double now_ns, int64_t size_bytes, Op op) {
  const BlockCost cost = block_cost(problem_->link, op, size_bytes, false);
  const double wire_free_ns = finish_ns_.empty() ? 0 : finish_ns_.back();
  launch_ns_ = std::max(now_ns, free_ns());
  finish_ns_.push_back(std::max(launch_ns_ + cost.alpha_ns, wire_free_ns) + cost.bytes_ns);
  return finish_ns_.back();
}

ReadyQueue::ReadyQueue(const Problem& problem, std::span<const int32_t> arrivals, std::span<const int32_t> rank)
    : problem_(&problem), arrivals_(arrivals), rank_(rank), sent_bytes_(problem.bytes.size(), 0) {}

void ReadyQueue::admit(double now_ns) {
  while (next_ready_ns() <= now_ns) {
    heap_.push_back(arrivals_[admitted_count_++]);
    std::push_heap(heap_.begin(), heap_.end(), [this](int32_t a, int32_t b) { return below(a, b); });
  }
}

void ReadyQueue::admit_all() {
  admit(std::numeric_limits<double>::max());
}

double ReadyQueue::next_ready_ns() const {
  return admitted_count_ < arrivals_.size() ? problem_->ready_ns[arrivals_[admitted_count_]]
                                            : std::numeric_limits<double>::infinity();
}

Piece ReadyQueue::top() const {
  GC_CHECK(!empty());
  const int32_t tensor = heap_.front();
  return {tensor, sent_bytes_[tensor], problem_->bytes[tensor]};
}

Piece ReadyQueue::take(int64_t size_bytes) {
  Piece piece = top();
  if (size_bytes < piece.size_bytes()) {
    piece.to_bytes = piece.from_bytes + size_bytes;
  } else {
    std::pop_heap(heap_.begin(), heap_.end(), [this](int32_t a, int32_t b) { return below(a, b); });
    heap_.pop_back();
  }
  sent_bytes_[piece.tensor] = piece.to_bytes;
  return piece;
}

int64_t whole_elements_bytes(const Problem& problem, int32_t tensor, int64_t unit_bytes) {
  const int64_t element_bytes = problem.element_bytes[problem.buffer[tensor]];
  return std::max(int64_t{1}, unit_bytes / element_bytes) * element_bytes;
}

double unit_count(const Problem& problem, int64_t unit_bytes) {
  double count = 0;
  for (int32_t i = 0; i < problem.tensor_count(); ++i) {
    const int64_t whole_bytes = whole_elements_bytes(problem, i, unit_bytes);
    count += static_cast<double>((problem.bytes[i] - 1) / whole_bytes + 1);
  }
  return count;
}

Block piece_block(const Problem& problem, const Piece& piece, std::string reason) {
  const int64_t offset_bytes = problem.offset_bytes[piece.tensor];
  Block block;
  block.buffer = problem.buffer[piece.tensor];
  block.ranges.push_back({offset_bytes + piece.from_bytes, offset_bytes + piece.to_bytes});
  block.reason = std::move(reason);
  return block;
}

std::vector<Block> joint_blocks(const Problem& problem, std::span<const Piece> pieces, const std::string& reason) {
  std::vector<Block> blocks;
  std::map<int32_t, size_t> block_of_buffer;
  for (const Piece& piece : pieces) {
    const auto [found, added] = block_of_buffer.try_emplace(problem.buffer[piece.tensor], blocks.size());
    if (added) {
      blocks.push_back(piece_block(problem, piece, reason));
    } else {
      const int64_t offset_bytes = problem.offset_bytes[piece.tensor];
      blocks[found->second].ranges.push_back({offset_bytes + piece.from_bytes, offset_bytes + piece.to_bytes});
    }
  }
  for (Block& block : blocks) {
    block.ranges = joined(std::move(block.ranges));
  }
  return blocks;
}

std::vector<Range> joined(std::vector<Range> ranges) {
  const auto before = [](const Range& a, const Range& b) { return a.lo_bytes < b.lo_bytes; };
  // Ready order usually runs through the buffer from its end.
  if (ranges.size() > 1 && before(ranges[1], ranges[0])) {
    std::reverse(ranges.begin(), ranges.end());
  }
  if (!std::is_sorted(ranges.begin(), ranges.end(), before)) {
    std::sort(ranges.begin(), ranges.end(), before);
  }
  std::vector<Range> merged;
  for (const Range& range : ranges) {
    if (!merged.empty() && merged.back().hi_bytes == range.lo_bytes) {
      merged.back().hi_bytes = range.hi_bytes;
    } else {
      merged.push_back(range);
    }
  }
  return merged;
}

double pieces_iteration_ns(const Problem& problem, std::span<const Piece> pieces) {
  VirtualLink link(problem);
  double iteration_ns = problem.backward_ns + problem.forward_ns;
  for (const Piece& piece : pieces) {
    const double arrival_ns = link.launch(problem.ready_ns[piece.tensor], piece.size_bytes());
    iteration_ns = std::max(iteration_ns, arrival_ns + problem.forward_ns - problem.need_ns[piece.tensor]);
  }
  return iteration_ns;
}

void check_block_count(double block_count, const char* parameter) {
  if (block_count > kBlockCountMax) {
    char text[160];
    std::snprintf(text, sizeof text, "the plan would have %.0f blocks, above the limit of %.0f; raise %s", block_count,
                  kBlockCountMax, parameter);
    throw Error(ErrorCode::kInvalidOption, text);
  }
}

std::string bytes_text(int64_t size_bytes) {
  constexpr const char* kUnits[] = {"B", "kB", "MB", "GB", "TB", "PB"};
  auto value = static_cast<double>(size_bytes);
  size_t unit = 0;
  // 999.95 would be shown as 1000.0.
  while (value >= 999.95 && unit + 1 < std::size(kUnits)) {
    value /= 1000;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
  return text;
}

}  // namespace gradcast
