#include "policies/online.h"

#include <algorithm>
#include <cstdio>
#include <limits>

#include "gradcast/error.h"

namespace gradcast {

ReadyQueue::ReadyQueue(const Problem& problem, std::span<const int32_t> arrivals, std::span<const int32_t> rank)
    : problem_(&problem), arrivals_(arrivals), rank_(rank), sent_bytes_(problem.bytes.size(), 0) {}

void ReadyQueue::admit(double now_ns) {
  while (next_ready_ns() <= now_ns) {
    heap_.push_back(arrivals_[admitted_count_++]);
    std::push_heap(heap_.begin(), heap_.end(), below());
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
    std::pop_heap(heap_.begin(), heap_.end(), below());
    heap_.pop_back();
  }
  sent_bytes_[piece.tensor] = piece.to_bytes;
  return piece;
}

std::vector<int64_t> sizes_to_try(int64_t given_bytes, std::span<const int64_t> tuned_bytes) {
  return given_bytes > 0 ? std::vector{given_bytes} : std::vector(tuned_bytes.begin(), tuned_bytes.end());
}

int64_t whole_elements_bytes(const Problem& problem, int32_t tensor, int64_t unit_bytes) {
  const int64_t element_bytes = problem.element_bytes(tensor);
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

}  // namespace gradcast
