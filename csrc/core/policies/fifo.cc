#include "policies/fifo.h"

#include "policies/online.h"

namespace gradcast {

std::vector<Block> fifo(const Problem& problem, const FifoOptions& /*options*/) {
  std::vector<Block> blocks;
  blocks.reserve(problem.bytes.size());
  for (const int32_t tensor : by_ready(problem)) {
    blocks.push_back(piece_block(problem, {tensor, 0, problem.bytes[tensor]}, "next ready"));
  }
  return blocks;
}

}  // namespace gradcast
