// Window chains: nested windows made from a profile whose windows are not nested. Enlarged windows give bounds, shrunk
// windows give plans.
//
// A bound for larger windows holds for the real ones, and a plan for smaller windows fits the real ones. Along any
// order of the tensors, running extremes of ready and need form a chain. Which order is best depends on the profile, so
// several are tried. A nested profile is its own chain in urgency order.
//
// Source: docs/internals/planner.md, "General windows". Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "cost/problem.h"
#include "gradcast/bound.h"
#include "gradcast/link.h"
#include "planner/zigzag.h"

namespace gradcast {

// Tensors by falling urgency, under some notion of it.
using Order = std::vector<int32_t>;

// True if zigzag along the first candidate order gives the best plan and its proof: windows form a chain (in hook mode
// they always do, by readiness), the cost is linear, one block is in flight, there is one buffer, and the plan needs no
// packing or packing is free.
bool has_exact_plan(const Problem& problem);

// Orders worth trying, the most promising first: by need (the profile's own), by ready descending, and mixtures. One
// order where the profile is nested; by ready alone in hook mode, where all needs are equal.
std::vector<Order> candidate_orders(const Problem& problem);

// The windows along `order` enlarged (running minimum of ready, running maximum of need) or shrunk (ready: the latest
// of all that are as urgent or less; need: the earliest of them).
Chain enlarged_chain(const Problem& problem, const Order& order, const OpCost& cost);
Chain shrunk_chain(const Problem& problem, const Order& order, const OpCost& cost);

// Parts of `order` on which enlarging costs less: the tensors that are needed early, those that are ready late, and the
// heaviest subset whose ready times fall along the order. A bound for some of the tensors holds for all of them.
std::vector<Order> sub_orders(const Problem& problem, const Order& order);

// bound() of gradcast/bound.h for code that already has a Problem; `any_op` as in BoundOptions.
Bound bound(const Problem& problem, bool any_op);

// The blocks of a plan: the bytes of each slot, cut at whole elements, one block per slot and buffer.
std::vector<Block> blocks_of(const Problem& problem, const Order& order, const std::vector<TimeSlot>& slots);

}  // namespace gradcast
