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
  // True: a bound over plans with every kind of operation that the link has. False: over all-reduce plans only.
  bool any_op = false;
};

struct Bound {
  // Jackson's preemptive bound for one machine (J. R. Jackson, "Scheduling a production line to minimize maximum
  // tardiness", 1955), with one alpha: max(B + F + U, max over ready times r and needs q of r + alpha + beta * bytes(S)
  // + the forward work after q), where S are the tensors with ready >= r and need <= q. A piecewise cost counts with
  // its smallest alpha and beta.
  double plain_ns = 0;
  // The best proven bound, never below plain_ns. With one block in flight it is the optimum T* of window chains
  // (docs/internals/planner.md); for sequential models and a linear cost that is the time of the best plan itself.
  double best_ns = 0;
  // A plan reaches best_ns, up to whole elements. True if windows are nested (in hook mode always, if packing is free),
  // the cost is linear, in_flight is 1, there is one buffer, and only all-reduces count.
  bool exact = false;
};

// Times in ns from the start of backward. Throws Error: kInvalidProfile, kInvalidLink, kInvalidOption (in_flight < 1).
Bound bound(const Profile& profile, const LinkModel& link, const BoundOptions& options);

}  // namespace gradcast
