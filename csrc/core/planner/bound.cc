#include "gradcast/bound.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <vector>

#include "cost/pieces.h"
#include "cost/problem.h"
#include "planner/window_chains.h"

namespace gradcast {
namespace {

// The cheapest way to finish a byte, in one all-reduce or two operations, for the plain formula. With several blocks in
// flight the start-up of a gather may pass behind the bytes of other scatters: only that of the first operation is sure
// to be paid.
LinkLine cheapest_line(const LinkModel& link, bool any_op, int32_t in_flight) {
  LinkLine line{link.all_reduce.alpha_ns_min(), link.all_reduce.beta_ns_per_byte_min()};
  if (any_op && link.can_scatter_gather()) {
    const double gather_alpha_ns = in_flight == 1 ? link.all_gather.alpha_ns_min() : 0;
    line.alpha_ns = std::min(line.alpha_ns, link.reduce_scatter.alpha_ns_min() + gather_alpha_ns);
    line.beta_ns_per_byte = std::min(
        line.beta_ns_per_byte, link.reduce_scatter.beta_ns_per_byte_min() + link.all_gather.beta_ns_per_byte_min());
  }
  return line;
}

// Jackson's bound: the value of the preemptive schedule that always sends the most urgent ready bytes, plus one alpha.
// Preemption is free in it, so it equals the maximum over ready times and needs in the definition, in O(N log N).
double preemptive_ns(const Problem& problem, const LinkLine& line) {
  const std::vector<int32_t> arrivals = by_ready(problem);
  std::vector<double> left_ns(problem.tensor_count());
  for (int32_t i = 0; i < problem.tensor_count(); ++i) {
    left_ns[i] = line.beta_ns_per_byte * static_cast<double>(problem.bytes[i]);
  }
  // A lower index is needed earlier, so the index is the priority.
  std::priority_queue<int32_t, std::vector<int32_t>, std::greater<>> available;
  double bound_ns = problem.backward_ns + problem.forward_ns;
  double clock_ns = 0;
  size_t next = 0;
  while (next < arrivals.size() || !available.empty()) {
    if (available.empty()) {
      clock_ns = std::max(clock_ns, problem.ready_ns[arrivals[next]]);
    }
    while (next < arrivals.size() && problem.ready_ns[arrivals[next]] <= clock_ns) {
      available.push(arrivals[next++]);
    }
    const int32_t tensor = available.top();
    const double until_ns = next < arrivals.size() ? problem.ready_ns[arrivals[next]] : kTimeMaxNs * kTimeMaxNs;
    if (clock_ns + left_ns[tensor] > until_ns) {
      left_ns[tensor] -= until_ns - clock_ns;
      clock_ns = until_ns;
      continue;
    }
    clock_ns += left_ns[tensor];
    available.pop();
    bound_ns = std::max(bound_ns, clock_ns + line.alpha_ns + problem.forward_ns - problem.need_ns[tensor]);
  }
  return bound_ns;
}

// Lines below the cost of an operation, for which the chain bound holds. A byte that is reduce-scattered and gathered
// takes part in two operations, each inside its tensor's window, so each operation counts one alpha and the byte both
// betas.
std::vector<LinkLine> chain_lines(const Problem& problem, bool any_op) {
  const LinkModel& link = problem.link;
  if (!any_op || !link.can_scatter_gather()) {
    return minorants(link.all_reduce, problem.total_bytes);
  }
  LinkLine line = cheapest_line(link, any_op, problem.in_flight);
  line.alpha_ns =
      std::min({link.all_reduce.alpha_ns_min(), link.reduce_scatter.alpha_ns_min(), link.all_gather.alpha_ns_min()});
  return {line};
}

// The largest optimum of the chains along `orders`, if it is above `bound_ns`. One decision tells most of them that it
// is not.
double chain_bound_ns(const Problem& problem, const LinkLine& line, const std::vector<Order>& orders, double bound_ns) {
  const OpCost cost = linear_cost(line);
  for (const Order& order : orders) {
    const Chain chain = enlarged_chain(problem, order, cost);
    if (!reachable(chain, bound_ns)) {
      bound_ns = std::max(bound_ns, optimum(chain).bound_ns);
    }
  }
  return bound_ns;
}

// Of the network alone.
Bound network_bound(const Problem& problem, bool any_op) {
  const bool nested = is_nested(problem);
  const auto plain_ns = [&](const LinkLine& line) {
    return nested ? plain_bound_ns(enlarged_chain(problem, candidate_orders(problem)[0], linear_cost(line)))
                  : preemptive_ns(problem, line);
  };
  Bound bound;
  bound.plain_ns = plain_ns(cheapest_line(problem.link, any_op, problem.in_flight));
  bound.best_ns = bound.plain_ns;
  if (problem.in_flight > 1) {
    return bound;  // blocks in flight hide each other's alpha: only one of them is sure to be paid
  }
  std::vector<Order> orders = candidate_orders(problem);
  if (!nested && problem.mode == Mode::kOverlap) {
    for (size_t i = 0, whole = orders.size(); i < whole; ++i) {
      for (Order& part : sub_orders(problem, orders[i])) {
        orders.push_back(std::move(part));
      }
    }
  }
  for (const LinkLine& line : chain_lines(problem, any_op)) {
    if (!any_op) {
      bound.best_ns = std::max(bound.best_ns, plain_ns(line));
    }
    bound.best_ns = chain_bound_ns(problem, line, orders, bound.best_ns);
  }
  bound.exact = !any_op && has_exact_plan(problem);
  return bound;
}

}  // namespace

// Parts, blocks and a host only ever add time to a plan, and every plan has one part and one block.
Bound bound(const Problem& problem, bool any_op) {
  Bound bound = network_bound(problem, any_op);
  const double host_ns = problem.host_ns(1, 1);
  bound.plain_ns = std::max(bound.plain_ns, host_ns);
  bound.best_ns = std::max(bound.best_ns, host_ns);
  bound.exact = bound.exact && !problem.has_part_costs();
  return bound;
}

Bound bound(const Profile& profile, const LinkModel& link, const BoundOptions& options) {
  return bound(make_problem(profile, link, options.mode, options.in_flight), options.any_op);
}

}  // namespace gradcast
