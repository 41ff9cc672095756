// Policies: pure functions from a profile and a link model to a plan.
//
// A policy that decides online in its paper is played in virtual time over the profile; its sequence of decisions is
// the plan. csrc/core/policies/ has one file per policy, which begins with its rules and source.
//
// Thread safety: pure; any thread.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "gradcast/plan.h"
#include "gradcast/profile.h"
#include "gradcast/types.h"

namespace gradcast {

// The default policy: gradcast's own.
inline constexpr std::string_view kDefaultPolicy = "forecast";

struct PolicyOptions {
  std::string policy{kDefaultPolicy};
  Mode mode = Mode::kOverlap;
  int32_t in_flight = 1;
  std::map<std::string, double> parameters = {};  // by name; absent ones take the policy's default
};

struct PolicyParameter {
  std::string name;  // with its unit: "slice_bytes"
  double default_value;
  std::string meaning;
};

struct PolicyInfo {
  std::string name;
  std::string summary;  // one line for --help
  std::string source;   // paper or code that it follows
  std::vector<PolicyParameter> parameters = {};
  bool overlap_only = false;          // has no hook-mode form
  bool needs_scatter_gather = false;  // needs the link's reduce_scatter and all_gather
};

// Every policy, `forecast` first, then in the order of their publication.
const std::vector<PolicyInfo>& policies();

// Plans one iteration. The result is checked and played: its predictions and bounds are filled in. Throws Error:
// kInvalidOption (unknown policy or parameter, value out of range, in_flight < 1, a mode the policy does not have),
// kInvalidProfile, kInvalidLink (no all_reduce, or a kind of operation that the policy needs is missing).
Plan make_plan(const Profile& profile, const LinkModel& link, const PolicyOptions& options);

}  // namespace gradcast
