#include "planner/window_chains.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "cost/pieces.h"

namespace gradcast {
namespace {

Order urgency_order(const Problem& problem) {
  Order order(problem.tensor_count());
  std::iota(order.begin(), order.end(), 0);
  return order;
}

// By share * (position in need) + (1 - share) * (position in readiness, latest first), both as shares of their range.
Order mixed_order(const Problem& problem, double share) {
  const double forward_ns = std::max(problem.forward_ns, 1.0);
  const double backward_ns = std::max(problem.backward_ns, 1.0);
  std::vector<double> key(problem.tensor_count());
  for (int32_t i = 0; i < problem.tensor_count(); ++i) {
    key[i] = share * problem.need_ns[i] / forward_ns - (1 - share) * problem.ready_ns[i] / backward_ns;
  }
  Order order = urgency_order(problem);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return key[a] < key[b]; });
  return order;
}

Chain chain_of(const Problem& problem, const Order& order, const OpCost& cost) {
  Chain chain;
  chain.backward_ns = problem.backward_ns;
  chain.forward_ns = problem.forward_ns;
  chain.cost = cost;
  chain.ready_ns.reserve(order.size());
  chain.need_ns.reserve(order.size());
  chain.end_bytes.reserve(order.size());
  int64_t bytes = 0;
  for (const int32_t tensor : order) {
    bytes += problem.bytes[tensor];
    chain.ready_ns.push_back(problem.ready_ns[tensor]);
    chain.need_ns.push_back(problem.need_ns[tensor]);
    chain.end_bytes.push_back(static_cast<double>(bytes));
  }
  return chain;
}

// The subset of `order` with most bytes whose ready times do not rise: a longest-subsequence search weighted by bytes,
// with prefix maxima in a Fenwick tree over the ranks of ready times.
Order heaviest_chain(const Problem& problem, const Order& order) {
  std::vector<double> ready;
  for (const int32_t tensor : order) {
    ready.push_back(problem.ready_ns[tensor]);
  }
  ready = distinct(std::move(ready));
  std::reverse(ready.begin(), ready.end());

  struct Best {
    int64_t bytes = 0;
    int32_t at = -1;  // position in `order` of the last tensor
  };
  std::vector<Best> tree(ready.size() + 1);
  std::vector<int32_t> previous(order.size(), -1);
  Best heaviest;
  for (size_t at = 0; at < order.size(); ++at) {
    const double ready_ns = problem.ready_ns[order[at]];
    const auto rank = std::lower_bound(ready.begin(), ready.end(), ready_ns, std::greater<>()) - ready.begin() + 1;
    Best before;
    for (auto node = rank; node > 0; node -= node & -node) {
      before = tree[node].bytes > before.bytes ? tree[node] : before;
    }
    previous[at] = before.at;
    const Best here{before.bytes + problem.bytes[order[at]], static_cast<int32_t>(at)};
    for (auto node = rank; node < static_cast<std::ptrdiff_t>(tree.size()); node += node & -node) {
      tree[node] = here.bytes > tree[node].bytes ? here : tree[node];
    }
    heaviest = here.bytes > heaviest.bytes ? here : heaviest;
  }
  Order chain;
  for (int32_t at = heaviest.at; at >= 0; at = previous[at]) {
    chain.push_back(order[at]);
  }
  std::reverse(chain.begin(), chain.end());
  return chain;
}

// Every 1/kQuantiles of the tensors, by the given time: thresholds at which to cut an order.
std::vector<double> quantiles(std::vector<double> times_ns) {
  constexpr size_t kQuantiles = 6;
  std::sort(times_ns.begin(), times_ns.end());
  std::vector<double> thresholds;
  for (size_t i = 1; i < kQuantiles; ++i) {
    thresholds.push_back(times_ns[i * (times_ns.size() - 1) / kQuantiles]);
  }
  return distinct(std::move(thresholds));
}

template <typename Keep>
void add_filtered(std::vector<Order>& orders, const Order& order, Keep keep) {
  Order part;
  std::copy_if(order.begin(), order.end(), std::back_inserter(part), keep);
  if (!part.empty() && part.size() < order.size()) {
    orders.push_back(std::move(part));
  }
}

std::string reason_of(const TimeSlot& slot, int32_t tensor, Mode mode) {
  const std::string name = "tensor " + std::to_string(tensor);
  switch (slot.side) {
    case Side::kBackward:
      return "backward: fills the link from when " + name + " is ready";
    case Side::kForward:
      return "forward: arrives when forward needs " + name;
    case Side::kCentre:
      break;
  }
  return mode == Mode::kHook ? "last: what is left for when the last gradient is ready"
                             : "centre: as much as forward can wait for when the last gradient is ready";
}

}  // namespace

bool has_exact_plan(const Problem& problem) {
  const bool nested = is_nested(problem);
  const bool chain = nested || (problem.mode == Mode::kHook && problem.link.pack_ns_per_byte == 0);
  return chain && problem.link.all_reduce.linear() && problem.in_flight == 1 && problem.buffer_count() == 1;
}

std::vector<Order> candidate_orders(const Problem& problem) {
  std::vector<Order> orders = {urgency_order(problem)};
  if (is_nested(problem)) {
    return orders;
  }
  if (problem.mode == Mode::kHook) {
    return {mixed_order(problem, 0)};
  }
  for (const double share : {0.0, 0.5, 0.8, 0.95}) {
    orders.push_back(mixed_order(problem, share));
  }
  std::vector<Order> distinct;
  for (Order& order : orders) {
    if (std::find(distinct.begin(), distinct.end(), order) == distinct.end()) {
      distinct.push_back(std::move(order));
    }
  }
  return distinct;
}

Chain enlarged_chain(const Problem& problem, const Order& order, const OpCost& cost) {
  Chain chain = chain_of(problem, order, cost);
  for (size_t i = 1; i < order.size(); ++i) {
    chain.ready_ns[i] = std::min(chain.ready_ns[i], chain.ready_ns[i - 1]);
    chain.need_ns[i] = std::max(chain.need_ns[i], chain.need_ns[i - 1]);
  }
  return chain;
}

Chain shrunk_chain(const Problem& problem, const Order& order, const OpCost& cost) {
  Chain chain = chain_of(problem, order, cost);
  for (size_t i = order.size() - 1; i > 0; --i) {
    chain.ready_ns[i - 1] = std::max(chain.ready_ns[i - 1], chain.ready_ns[i]);
    chain.need_ns[i - 1] = std::min(chain.need_ns[i - 1], chain.need_ns[i]);
  }
  return chain;
}

std::vector<Order> sub_orders(const Problem& problem, const Order& order) {
  std::vector<Order> orders;
  for (const double need_ns : quantiles(problem.need_ns)) {
    add_filtered(orders, order, [&](int32_t tensor) { return problem.need_ns[tensor] <= need_ns; });
  }
  for (const double ready_ns : quantiles(problem.ready_ns)) {
    add_filtered(orders, order, [&](int32_t tensor) { return problem.ready_ns[tensor] >= ready_ns; });
  }
  Order chain = heaviest_chain(problem, order);
  if (chain.size() < order.size()) {
    orders.push_back(std::move(chain));
  }
  return orders;
}

std::vector<Block> blocks_of(const Problem& problem, const Order& order, const std::vector<TimeSlot>& slots) {
  // Where each tensor of the order begins, in bytes of the chain.
  std::vector<int64_t> begin_bytes(order.size() + 1, 0);
  for (size_t at = 0; at < order.size(); ++at) {
    begin_bytes[at + 1] = begin_bytes[at] + problem.bytes[order[at]];
  }
  // A cut inside a tensor moves down to a whole element; both neighbours of a cut see the same one.
  const auto cut_in = [&](int32_t tensor, int64_t begin, double chain_bytes) {
    const int64_t element_bytes = problem.element_bytes(tensor);
    const double inside =
        std::clamp(chain_bytes - static_cast<double>(begin), 0.0, static_cast<double>(problem.bytes[tensor]));
    return static_cast<int64_t>(inside) / element_bytes * element_bytes;
  };

  std::vector<Block> blocks;
  for (const TimeSlot& slot : slots) {
    std::vector<Piece> pieces;
    const auto first = std::upper_bound(begin_bytes.begin(), begin_bytes.end(), static_cast<int64_t>(slot.lo_bytes));
    for (auto at = static_cast<size_t>(first - begin_bytes.begin()) - 1;
         at < order.size() && static_cast<double>(begin_bytes[at]) < slot.hi_bytes; ++at) {
      const int64_t from_bytes = cut_in(order[at], begin_bytes[at], slot.lo_bytes);
      const int64_t to_bytes = cut_in(order[at], begin_bytes[at], slot.hi_bytes);
      if (to_bytes > from_bytes) {
        pieces.push_back({order[at], from_bytes, to_bytes});
      }
    }
    for (Block& block : joint_blocks(problem, pieces, reason_of(slot, order[slot.tensor], problem.mode))) {
      blocks.push_back(std::move(block));
    }
  }
  return blocks;
}

}  // namespace gradcast
