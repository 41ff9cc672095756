// The published policies, with their sources and parameters.
//
// Thread safety: pure; any thread.
#pragma once

#include <vector>

#include "policies/policy_entry.h"

namespace gradcast {

// In the order of their publication. gradcast's own policy is not among them: planner/make_plan.cc adds it in front.
std::vector<PolicyEntry> published_policies();

}  // namespace gradcast
