// Lower bounds of the iteration time, for code that already has a Problem. gradcast/bound.h says what they mean.
//
// Thread safety: pure; any thread.
#pragma once

#include "cost/problem.h"
#include "gradcast/bound.h"

namespace gradcast {

// bound() on a problem. `any_op` as in BoundOptions.
Bound bound(const Problem& problem, bool any_op);

}  // namespace gradcast
