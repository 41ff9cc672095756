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
  Profile profile{"by hand", 1, forward_ns, backward_ns, {}, {}};
  for (const Item& item : items) {
    const std::string name = "t" + std::to_string(profile.tensors.size());
    profile.tensors.push_back({name, item.bytes, item.buffer, 1, item.ready_ns, item.need_ns, item.update_ns});
  }
  return profile;
}

inline LinkModel link_of(double alpha_ns, double beta_ns_per_byte) {
  return {linear_cost({alpha_ns, beta_ns_per_byte}), {}, {}};
}

inline Block block_of(const std::vector<Range>& ranges, Op op = Op::kAllReduce, int32_t buffer = 0) {
  return {op, buffer, ranges};
}

inline Plan plan_of(const std::vector<Block>& blocks, Mode mode = Mode::kOverlap, int32_t in_flight = 1) {
  return {"by hand", mode, in_flight, blocks};
}

}  // namespace gradcast
