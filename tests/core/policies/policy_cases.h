// Small problems and plans in a form that tests can write down and compare.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cost/problem.h"
#include "gradcast/plan.h"
#include "gradcast/profile.h"
#include "tests/core/hand_profiles.h"

namespace gradcast {

// The rest of a small problem: its passes, its link and how it is played.
struct Case {
  double backward_ns = 100;
  double forward_ns = 100;
  double alpha_ns = 1;
  double beta_ns_per_byte = 1;
  Mode mode = Mode::kOverlap;
  int32_t in_flight = 1;
};

inline Profile profile_of(const std::vector<Item>& items, const Case& options = {}) {
  Profile profile = profile_of(options.backward_ns, options.forward_ns, items);
  profile.link = link_of(options.alpha_ns, options.beta_ns_per_byte);
  profile.link.reduce_scatter = profile.link.all_gather = scaled(profile.link, 0.5, 0.5).all_reduce;
  return profile;
}

inline Problem problem_of(const std::vector<Item>& items, const Case& options = {}) {
  const Profile profile = profile_of(items, options);
  return make_problem(profile, profile.link, options.mode, options.in_flight);
}

// Blocks as text: "0:[0,4)[8,12)" is an all-reduce of two ranges of buffer 0; "rs " and "ag " come before the other
// kinds.
inline std::vector<std::string> shown(std::span<const Block> blocks) {
  std::vector<std::string> texts;
  for (const Block& block : blocks) {
    std::string text = block.op == Op::kReduceScatter ? "rs " : block.op == Op::kAllGather ? "ag " : "";
    text += std::to_string(block.buffer) + ":";
    for (const Range& range : block.ranges) {
      text += "[" + std::to_string(range.lo_bytes) + "," + std::to_string(range.hi_bytes) + ")";
    }
    texts.push_back(text);
  }
  return texts;
}

using Shown = std::vector<std::string>;

}  // namespace gradcast
