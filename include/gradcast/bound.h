// Lower bounds of the iteration time over all plans; docs/planner.md has the proofs.
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
  // best_ns is reached: the profile is nested, the cost linear, in_flight 1, one buffer, all-reduce only.
  bool exact = false;
};

Bound bound(const Profile& profile, const LinkModel& link, const BoundOptions& options);

}  // namespace gradcast
