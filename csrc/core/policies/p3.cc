// p3: priority-based parameter propagation: every tensor is cut into small slices, and whenever the link is free the
// most urgent slice that is ready goes next.
//
// A slice is the unit of preemption: an urgent gradient waits for at most one slice. Nothing is measured and nothing
// is merged, so every slice pays a start-up cost.
//
// Source: Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training" (MLSys 2019);
// the default of 40,000 elements is MXNET_KVSTORE_SLICE_THRESHOLD of the authors' code.
//
// Choices: the paper runs on a parameter server; here a slice is an all-reduce. There is no credit: slices are handed
// to the link one by one as it becomes free (as in_flight allows), which is the strictest priority.
#include <algorithm>

#include "policies/online.h"
#include "policies/published.h"

namespace gradcast {
namespace {

int64_t slice_bytes(const Problem& problem, int32_t tensor, int64_t slice_elements) {
  const int64_t element_bytes = problem.element_bytes(tensor);
  return std::min(slice_elements, problem.bytes[tensor] / element_bytes) * element_bytes;
}

}  // namespace

double slice_count(const Problem& problem, int64_t slice_elements) {
  double count = 0;
  for (int32_t i = 0; i < problem.tensor_count(); ++i) {
    count += static_cast<double>((problem.bytes[i] - 1) / slice_bytes(problem, i, slice_elements) + 1);
  }
  return count;
}

std::vector<Block> p3(const Problem& problem, const P3Options& options) {
  const double count = slice_count(problem, options.slice_elements);
  check_block_count(count, "slice_elements");
  std::vector<Block> blocks;
  blocks.reserve(static_cast<size_t>(count));
  const std::vector<int32_t> arrivals = by_ready(problem);
  ReadyQueue queue(problem, arrivals);
  VirtualLink link(problem);
  while (!queue.finished()) {
    const double now_ns = queue.empty() ? std::max(link.free_ns(), queue.next_ready_ns()) : link.free_ns();
    queue.admit(now_ns);
    const int32_t tensor = queue.top().tensor;
    const Piece slice = queue.take(slice_bytes(problem, tensor, options.slice_elements));
    link.launch(now_ns, slice.size_bytes());
    blocks.push_back(piece_block(problem, slice, "most urgent slice"));
  }
  return blocks;
}

}  // namespace gradcast
