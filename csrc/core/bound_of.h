// bound() on a problem (see gradcast/bound.h), for callers that have one already.
//
// Thread safety: pure; any thread.
#pragma once

#include "gradcast/bound.h"
#include "problem.h"

namespace gradcast {

Bound bound(const Problem& problem, bool any_op);

}  // namespace gradcast
