// fifo: one all-reduce per tensor, in the order in which the gradients become ready (wait-free backpropagation).
//
// Communication overlaps backward as soon as the first gradient exists; the most urgent gradients go last, and every
// small tensor pays a start-up cost of its own.
//
// Source: Zhang et al., "Poseidon" (USENIX ATC 2017); "WFBP" in the papers that compare with it.
#include "policies/online.h"
#include "policies/published.h"

namespace gradcast {

std::vector<Block> fifo(const Problem& problem, const NoOptions& /*options*/) {
  std::vector<Block> blocks;
  blocks.reserve(problem.bytes.size());
  for (const int32_t tensor : by_ready(problem)) {
    blocks.push_back(piece_block(problem, {tensor, 0, problem.bytes[tensor]}, "next ready"));
  }
  return blocks;
}

}  // namespace gradcast
