// Lower bounds of the iteration time over all plans; docs/internals/planner.md has the proofs.
//
// Thread safety: pure; any thread.
#pragma once

#include "gradcast/link.h"
#include "gradcast/profile.h"
#include "gradcast/types.h"

namespace gradcast {

struct BoundOptions {
  Mode mode = Mode::kOverlap;
  int32_t in_flight = 1;
  // true: over plans that may use any kind of operation that the link has; false: over all-reduce plans only.
  bool any_op = false;
};

struct Bound {
  // max(B + F + U, max over ready times r and needs q of r + alpha + beta * bytes(S) + what forward still has to run after q),
  // S the tensors with ready >= r and need <= q: Jackson's preemptive bound for one machine, with one alpha. With a
  // piecewise cost, its smallest alpha and smallest beta.
  double plain_ns = 0;
  // The best proven bound, never below plain_ns: for one block in flight T* of the nested relaxations, which is the value of
  // the best plan itself where later ready means more urgent and the cost is linear.
  double best_ns = 0;
  // best_ns is reached, up to whole elements: windows are nested (in hook mode always, if packing is free), the cost is linear,
  // in_flight is 1, there is one buffer, and only all-reduces count.
  bool exact = false;
};

Bound bound(const Profile& profile, const LinkModel& link, const BoundOptions& options);

}  // namespace gradcast
