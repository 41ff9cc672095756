// The search over numbers of units sent. What it relies on, for blocks of all-reduce, one in flight, no packing cost:
//
// A. Which units of a tensor a block carries does not matter, only how many: they are ready together and the tensor
// arrives
//    with the last of them. A state is the count of units sent by tensor.
// B. For given starts, sizes and buffers of the blocks, each block may carry the most urgent units that are ready at
// its
//    start. Where it carries a unit of j while a unit of a more urgent i (need[i] <= need[j]) is ready and travels
//    later in the same buffer, swap the two: j was ready for the earlier block, so it is for the later; i does not
//    arrive later; j arrives no later than the later of its old arrival and i's old arrival, and as need[i] <= need[j]
//    the greatest lateness does not grow. Each swap moves a more urgent unit forward, so this ends. Sizes stay, and so
//    do costs.
// C. A block starts when the link is free or at a later ready time of a tensor that it carries: play starts it at the
// later
//    of the two, and waiting for something that it does not carry only makes everything later.
// D. Of two ways into a state the one that frees the link no later and has no greater lateness is as good: what follows
// is
//    the same, each block no later. Lateness below the end of backward does not count.
// E. What is not sent yet travels once the link is free, one block after another. So the last block that carries units
// of
//    the tensors needed by q ends no earlier than that time + the least that blocks for so many units cost, and
//    completes one of these tensors. A state that can therefore not beat the best plan known is dropped, and in D a
//    lateness that is going to be exceeded anyway does not count.
//
// The cost of a block may be any function of its size.
#include "tests/core/planner/exhaustive.h"

#include <algorithm>
#include <array>
#include <limits>
#include <stdexcept>

#include "tests/core/planner/exhaustive_grid.h"

namespace gradcast {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
constexpr int64_t kStateCountMax = 4'000'000;
constexpr int32_t kTensorCountMax = 22;  // of one unit each: 2^22 states

using Counts = std::array<int32_t, kTensorCountMax>;

// A way into a state: the link is free at free_ns, the greatest lateness so far is lateness_ns.
struct Node {
  double free_ns;
  double lateness_ns;
  int32_t parent;
  int32_t state;
  int32_t next = -1;  // another way into the same state
};

class CountSearch {
 public:
  explicit CountSearch(const Grid& grid) : grid_(grid) {
    int64_t state_count = 1;
    if (grid.tensor_count() > kTensorCountMax) {
      throw std::invalid_argument("too many tensors for an exhaustive search");
    }
    for (const int32_t units : grid.units) {
      stride_.push_back(static_cast<int32_t>(state_count));
      state_count *= units + 1;
      if (state_count > kStateCountMax) {
        throw std::invalid_argument("too many states for an exhaustive search");
      }
    }
    full_state_ = static_cast<int32_t>(state_count - 1);
    tail_ns_.assign(state_count, kInfinite);
    // The least that blocks cost which carry so many units, and perhaps others.
    least_cost_ns_.assign(grid.unit_count + 1, kInfinite);
    least_cost_ns_[0] = 0;
    for (int32_t units = 1; units <= grid.unit_count; ++units) {
      for (int32_t size = 1; size <= grid.unit_count; ++size) {
        const double rest_ns = least_cost_ns_[std::max(units - size, 0)];
        least_cost_ns_[units] = std::min(least_cost_ns_[units], grid.cost_ns[size] + rest_ns);
      }
    }
  }

  ExhaustivePlan best() {
    first_node_.assign(tail_ns_.size(), -1);
    by_units_.assign(grid_.unit_count + 1, {});
    lateness_ns_max_ = kInfinite;
    add_way({0, grid_.backward_ns, -1, 0}, 0);
    for (int32_t sent = 0; sent < grid_.unit_count; ++sent) {
      for (const int32_t state : by_units_[sent]) {
        const Counts counts = counts_of(state);
        for (int32_t node = first_node_[state]; node >= 0; node = nodes_[node].next) {
          extend(node, counts, [&](const Node& way, int32_t units) { add_way(way, sent + units); });
        }
      }
    }
    return plan_of(first_node_[full_state_]);
  }

 private:
  Counts counts_of(int32_t state) const {
    Counts counts{};
    for (int32_t i = 0; i < grid_.tensor_count(); ++i) {
      counts[i] = state / stride_[i] % (grid_.units[i] + 1);
    }
    return counts;
  }

  // Calls visit(way, units) for every next block (arguments B and C).
  template <typename Visit>
  void extend(int32_t parent, const Counts& sent, const Visit& visit) {
    const Node from = nodes_[parent];  // a copy: visit may grow nodes_
    extend_at(from, parent, from.free_ns, sent, visit);
    for (int32_t i = 0; i < grid_.tensor_count(); ++i) {
      const bool seen = std::find(grid_.ready_ns.begin(), grid_.ready_ns.begin() + i, grid_.ready_ns[i]) !=
                        grid_.ready_ns.begin() + i;
      if (grid_.ready_ns[i] > from.free_ns && !seen) {
        extend_at(from, parent, grid_.ready_ns[i], sent, visit);
      }
    }
  }

  template <typename Visit>
  void extend_at(const Node& from, int32_t parent, double start_ns, const Counts& sent, const Visit& visit) {
    for (int32_t buffer = 0; buffer < grid_.buffer_count; ++buffer) {
      Node way{0, from.lateness_ns, parent, from.state};
      int32_t units = 0;
      bool waited_for = start_ns == from.free_ns;
      double need_ns = kInfinite;  // of the most urgent tensor that this block completes
      for (int32_t i = 0; i < grid_.tensor_count(); ++i) {
        if (grid_.buffer[i] != buffer || grid_.ready_ns[i] > start_ns || sent[i] == grid_.units[i]) {
          continue;
        }
        waited_for = waited_for || grid_.ready_ns[i] == start_ns;
        for (int32_t left = grid_.units[i] - sent[i]; left > 0; --left) {
          ++units;
          way.state += stride_[i];
          if (left == 1) {
            need_ns = std::min(need_ns, grid_.need_ns[i]);
          }
          if (waited_for) {
            way.free_ns = start_ns + grid_.cost_ns[units];
            way.lateness_ns = std::max(from.lateness_ns, way.free_ns - need_ns);
            visit(way, units);
          }
        }
      }
    }
  }

  void add_way(Node way, int32_t sent) {
    way.lateness_ns = std::max(way.lateness_ns, way.free_ns + tail_ns(way.state));  // arguments D and E
    if (way.lateness_ns >= lateness_ns_max_) {
      return;
    }
    int32_t* link = &first_node_[way.state];
    if (*link < 0) {
      by_units_[sent].push_back(way.state);
    }
    while (*link >= 0) {
      Node& other = nodes_[*link];
      if (other.free_ns <= way.free_ns && other.lateness_ns <= way.lateness_ns) {
        return;
      }
      if (way.free_ns <= other.free_ns && way.lateness_ns <= other.lateness_ns) {
        *link = other.next;  // not extended yet: states of fewer units come first
      } else {
        link = &other.next;
      }
    }
    way.next = first_node_[way.state];
    first_node_[way.state] = static_cast<int32_t>(nodes_.size());
    nodes_.push_back(way);
    if (way.state == full_state_) {
      lateness_ns_max_ = way.lateness_ns;
    }
  }

  // What lateness is less the time at which the link is free, at least (argument E); -infinite if nothing is left.
  double tail_ns(int32_t state) {
    double& tail_ns = tail_ns_[state];
    if (tail_ns == kInfinite) {
      const Counts sent = counts_of(state);
      tail_ns = -kInfinite;
      int32_t units = 0;
      for (int32_t i = 0; i < grid_.tensor_count(); ++i) {
        if (sent[i] < grid_.units[i]) {
          units += grid_.units[i] - sent[i];
          tail_ns = std::max(tail_ns, least_cost_ns_[units] - grid_.need_ns[i]);
        }
      }
    }
    return tail_ns;
  }

  ExhaustivePlan plan_of(int32_t node) const {
    ExhaustivePlan plan;
    if (node < 0) {
      return plan;
    }
    plan.iteration_ns = grid_.iteration_ns(nodes_[node].lateness_ns);
    for (; nodes_[node].parent >= 0; node = nodes_[node].parent) {
      const Counts sent = counts_of(nodes_[node].state);
      const Counts before = counts_of(nodes_[nodes_[node].parent].state);
      std::vector<int32_t> units;
      for (int32_t i = 0; i < grid_.tensor_count(); ++i) {
        for (int32_t unit = before[i]; unit < sent[i]; ++unit) {
          units.push_back(grid_.first_unit[i] + unit);
        }
      }
      plan.blocks.push_back(grid_block(grid_, units));
    }
    std::reverse(plan.blocks.begin(), plan.blocks.end());
    return plan;
  }

  const Grid& grid_;
  std::vector<int32_t> stride_;
  int32_t full_state_ = 0;
  std::vector<double> least_cost_ns_;           // by units
  std::vector<double> tail_ns_;                 // by state; infinite: not computed yet
  std::vector<int32_t> first_node_;             // by state
  std::vector<std::vector<int32_t>> by_units_;  // states by units sent
  std::vector<Node> nodes_;
  double lateness_ns_max_ = 0;
};

}  // namespace

ExhaustivePlan exhaustive_best(const Profile& profile, const LinkModel& link, const ExhaustiveOptions& options) {
  const Grid grid = make_grid(profile, link, options);
  const bool by_sets = options.any_op || options.by_sets || grid.packing_costs || grid.in_flight > 1;
  return by_sets ? best_by_sets(grid, link, options.any_op) : CountSearch(grid).best();
}

}  // namespace gradcast
