// Profiles, links and plans written by hand in tests: few numbers, elements of one byte.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gradcast/link.h"
#include "gradcast/plan.h"
#include "gradcast/profile.h"

namespace gradcast {

struct Item {
  int64_t bytes = 1;
  double ready_ns = 0;
  double need_ns = 0;
  double update_ns = 0;
  int32_t buffer = 0;
};

inline Profile profile_of(double backward_ns, double forward_ns, const std::vector<Item>& items) {
  Profile profile;
  profile.name = "by hand";
  profile.backward_ns = backward_ns;
  profile.forward_ns = forward_ns;
  for (const Item& item : items) {
    Tensor tensor;
    tensor.name = "t" + std::to_string(profile.tensors.size());
    tensor.bytes = item.bytes;
    tensor.element_bytes = 1;
    tensor.buffer = item.buffer;
    tensor.ready_ns = item.ready_ns;
    tensor.need_ns = item.need_ns;
    tensor.update_ns = item.update_ns;
    profile.tensors.push_back(tensor);
  }
  return profile;
}

inline LinkModel link_of(double alpha_ns, double beta_ns_per_byte) {
  LinkModel link;
  link.all_reduce = linear_cost({alpha_ns, beta_ns_per_byte});
  return link;
}

inline Block block_of(const std::vector<Range>& ranges, Op op = Op::kAllReduce, int32_t buffer = 0) {
  Block block;
  block.op = op;
  block.buffer = buffer;
  block.ranges = ranges;
  return block;
}

inline Plan plan_of(const std::vector<Block>& blocks, Mode mode = Mode::kOverlap, int32_t in_flight = 1) {
  Plan plan;
  plan.policy = "by hand";
  plan.mode = mode;
  plan.in_flight = in_flight;
  plan.blocks = blocks;
  return plan;
}

}  // namespace gradcast
