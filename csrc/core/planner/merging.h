// Merging: fewer blocks where time allows it.
//
// Each block costs more than its model says, now and then: a thread that has to be woken, a packet that comes late. A
// plan that is nearly as fast with fewer blocks pays for that less often.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "cost/problem.h"
#include "gradcast/plan.h"

namespace gradcast {

// The same bytes with neighbours of one buffer joined, as many as keep play's iteration time within `allowed_ns`: first
// those that cost nothing, then those that cost more. Not the fewest that there are. Only all-reduces are joined. Tries
// at most `evaluations`. REQUIRES: the blocks pass check_plan.
std::vector<Block> merged(const Problem& problem, std::vector<Block> blocks, double allowed_ns, int64_t evaluations);

}  // namespace gradcast
