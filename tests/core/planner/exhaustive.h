// Exhaustive search over the plans of a tiny profile: what the planner and the bound are held against.
//
// Time and bytes are searched, not argued about: every plan of all-reduce blocks whose cuts lie on a grid of
// `unit_bytes`, with one block in flight, is covered, in dependence on nothing of csrc/core but the value types. Two
// searches do the same work in ways that share no argument. exhaustive_best and exhaustive_fewest count the units sent
// of each tensor and use a few exchange arguments, each stated in exhaustive.cc; exhaustive_best_by_subsets tries every
// set of units as the next block, which is slower, knows no argument beyond "an earlier finish is no worse", and alone
// knows what packing costs. The first two hand over to it where packing costs something.
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
};

// A plan that is best in the sense of the function that returns it, with the time that the search found for it.
struct ExhaustivePlan {
  double iteration_ns = std::numeric_limits<double>::infinity();
  std::vector<Block> blocks;
};

// The shortest iteration on the grid. REQUIRES (throws std::invalid_argument): tensors in urgency order, sizes
// multiples of unit_bytes, at most 4 million combinations of units sent (30 units in 5 tensors are 17 thousand); at
// most 14 units where packing costs something.
ExhaustivePlan exhaustive_best(const Profile& profile, const LinkModel& link, const ExhaustiveOptions& options);

// The fewest blocks of any plan on the grid within `iteration_ns_max` (1e-12 of it is forgiven); no blocks and an
// infinite time if there is none. Same requirements.
ExhaustivePlan exhaustive_fewest(const Profile& profile, const LinkModel& link, const ExhaustiveOptions& options,
                                 double iteration_ns_max);

// As exhaustive_best, by trying every set of unsent units as the next block. At most 14 units.
ExhaustivePlan exhaustive_best_by_subsets(const Profile& profile, const LinkModel& link,
                                          const ExhaustiveOptions& options);

// As exhaustive_fewest, in the same way.
ExhaustivePlan exhaustive_fewest_by_subsets(const Profile& profile, const LinkModel& link,
                                            const ExhaustiveOptions& options, double iteration_ns_max);

// The shortest iteration over plans of every kind of operation that the link has, one block in flight. At most 7 units.
ExhaustivePlan exhaustive_best_any_op(const Profile& profile, const LinkModel& link, const ExhaustiveOptions& options);

// Hook mode with what DDP's buckets can express: the shortest iteration over all 2^(N-1) ways to cut the tensors, in
// the order in which they become ready (equal ones: the less urgent first), into buckets of whole tensors. REQUIRES:
// one buffer, at most 20 tensors.
double best_whole_tensor_buckets_ns(const Profile& profile, const LinkModel& link);

}  // namespace gradcast
