#include "cost/problem.h"

#include <algorithm>
#include <string>

#include "gradcast/error.h"

namespace gradcast {

Problem make_problem(const Profile& profile, const LinkModel& link, Mode mode, int32_t in_flight) {
  if (in_flight < 1) {
    throw Error(ErrorCode::kInvalidOption,
                "in_flight is " + std::to_string(in_flight) + "; at least one block must be in flight");
  }
  check_profile(profile);
  check_link(link);

  Problem problem;
  problem.mode = mode;
  problem.in_flight = in_flight;
  problem.link = link;
  problem.backward_ns = profile.backward_ns;
  problem.part_ns = profile.part_ns;
  problem.host_step_ns = profile.host_step_ns;
  problem.host_part_ns = profile.host_part_ns;
  problem.host_block_ns = profile.host_block_ns;
  problem.buffers = buffers_of(profile);
  const size_t count = profile.tensors.size();
  for (auto* times : {&problem.ready_ns, &problem.need_ns, &problem.update_ns}) {
    times->reserve(count);
  }
  problem.bytes.reserve(count);
  problem.buffer.reserve(count);
  double updates_ns = 0;
  for (const Tensor& tensor : profile.tensors) {
    problem.bytes.push_back(tensor.bytes);
    problem.buffer.push_back(tensor.buffer);
    problem.ready_ns.push_back(tensor.ready_ns);
    problem.need_ns.push_back(mode == Mode::kOverlap ? tensor.need_ns + updates_ns : 0.0);
    problem.update_ns.push_back(tensor.update_ns);
    problem.total_bytes += tensor.bytes;
    updates_ns += tensor.update_ns;
  }
  problem.offset_bytes.resize(count);
  for (const BufferLayout& buffer : problem.buffers) {
    for (size_t at = 1; at < buffer.tensors.size(); ++at) {
      problem.offset_bytes[buffer.tensors[at]] = buffer.end_bytes[at - 1];
    }
  }
  problem.forward_ns = profile.forward_ns + updates_ns;
  return problem;
}

Problem without_host(Problem problem) {
  problem.part_ns = problem.host_step_ns = problem.host_part_ns = problem.host_block_ns = 0;
  return problem;
}

double block_ready_ns(const Problem& problem, const Block& block) {
  double ready_ns = 0;
  for_each_tensor(problem, block, [&](int32_t tensor) { ready_ns = std::max(ready_ns, problem.ready_ns[tensor]); });
  return ready_ns;
}

BlockCost block_cost(const LinkModel& link, Op op, int64_t size_bytes, bool packed) {
  const OpCost& cost = link.of(op);
  if (!cost.available()) {
    const std::string name(to_string(op));
    throw Error(ErrorCode::kInvalidLink, "the link has no cost for " + name + "; add link." + name +
                                             ", or choose a plan that does not use this operation");
  }
  const LinkPiece& piece = cost.piece(size_bytes);
  const double per_byte_ns = piece.beta_ns_per_byte + (packed ? link.pack_ns_per_byte : 0);
  return {piece.alpha_ns, per_byte_ns * static_cast<double>(size_bytes)};
}

BlockCost block_cost(const LinkModel& link, const Block& block) {
  return block_cost(link, block.op, block.size_bytes(), block.ranges.size() > 1);
}

bool is_nested(const Problem& problem) {
  return std::is_sorted(problem.ready_ns.begin(), problem.ready_ns.end(), std::greater<>());
}

}  // namespace gradcast
