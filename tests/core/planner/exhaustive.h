// Exhaustive search over the plans of a tiny profile: what the planner and the bound are held against.
//
// Time and bytes are searched, not argued about: every plan whose cuts lie on a grid of `unit_bytes` is covered, in
// dependence on nothing of csrc/core but the value types. Two searches do the same work in ways that share no argument:
// the one of exhaustive.cc counts the units sent of each tensor and uses a few exchange arguments; the one of
// exhaustive_sets.cc tries every set of units as the next block, which is slower, knows no argument beyond "an earlier
// finish is no worse", and alone knows packing that costs, several blocks in flight, other operations than all-reduce,
// and how many blocks a plan has. It takes over where one of these matters.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "gradcast/link.h"
#include "gradcast/plan.h"
#include "gradcast/profile.h"

namespace gradcast {

struct ExhaustiveOptions {
  Mode mode = Mode::kOverlap;
  int64_t unit_bytes = 4;  // cuts lie at its multiples; every tensor's size is one
  int32_t in_flight = 1;   // at most 3
  bool any_op = false;     // plans of every kind of operation that the link has, one block in flight; best only
  bool by_sets = false;    // the second search, whatever else is asked for
};

// A plan that is best in the sense of the function that returns it, with the time that the search found for it.
struct ExhaustivePlan {
  double iteration_ns = std::numeric_limits<double>::infinity();
  std::vector<Block> blocks;
};

// The shortest iteration on the grid. REQUIRES (throws std::invalid_argument): tensors in urgency order, sizes
// multiples of unit_bytes, at most 4 million combinations of units sent (30 units in 5 tensors are 17 thousand); by
// sets at most 14 units, 7 with any_op.
ExhaustivePlan exhaustive_best(const Profile& profile, const LinkModel& link, const ExhaustiveOptions& options);

// The fewest blocks of any plan on the grid within `iteration_ns_max` (1e-12 of it is forgiven); no blocks and an
// infinite time if there is none. By sets.
ExhaustivePlan exhaustive_fewest(const Profile& profile, const LinkModel& link, const ExhaustiveOptions& options,
                                 double iteration_ns_max);

// Hook mode with what DDP's buckets can express: the shortest iteration over all 2^(N-1) ways to cut the tensors, in
// the order in which they become ready (equal ones: the less urgent first), into buckets of whole tensors. REQUIRES:
// one buffer, at most 20 tensors.
double best_whole_tensor_buckets_ns(const Profile& profile, const LinkModel& link);

}  // namespace gradcast
