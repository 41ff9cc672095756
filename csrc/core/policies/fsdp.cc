// fsdp: one all-reduce for what becomes ready at the same time, in the order of readiness, as HSDP and replicate() send.
//
// The sharded gradients of one of FSDP's groups exist when the group's reduce-scatter has ended, all at the same time,
// and its all-reduce over the replicas follows. The profile of a sharded module therefore has one time of readiness for
// each group; groups of the same time are sent together. In other profiles most tensors are alone, as with fifo.
//
// Source: PyTorch FSDP2, torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_reduce.
#include "policies/online.h"
#include "policies/published.h"

namespace gradcast {

std::vector<Block> fsdp(const Problem& problem, const NoOptions& /*options*/) {
  std::vector<Block> blocks;
  const std::vector<int32_t> arrivals = by_ready(problem);
  for (size_t first = 0; first < arrivals.size();) {
    std::vector<std::vector<Piece>> by_buffer(problem.buffers.size());
    size_t next = first;
    for (; next < arrivals.size() && problem.ready_ns[arrivals[next]] == problem.ready_ns[arrivals[first]]; ++next) {
      const int32_t tensor = arrivals[next];
      by_buffer[problem.buffer[tensor]].push_back({tensor, 0, problem.bytes[tensor]});
    }
    for (const std::vector<Piece>& pieces : by_buffer) {
      if (!pieces.empty()) {
        blocks.push_back(joint_blocks(problem, pieces, std::to_string(pieces.size()) + " tensors of a group").front());
      }
    }
    first = next;
  }
  return blocks;
}

}  // namespace gradcast
