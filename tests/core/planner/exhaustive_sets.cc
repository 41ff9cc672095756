// The search over sets of units, for all kinds of operation. A unit waits, is reduce-scattered, or is done, by an
// all-gather or an all-reduce. A block is any set of units of one buffer that may take its operation next; it starts as
// play says, when the link is free and everything that it touches is ready (an all-gather has nothing to wait for but
// the link, since one block is in flight where there are any), and costs what play says. The only argument: of two ways
// to the same state the one that frees the link no later, with no greater lateness (and no more blocks), is as good,
// because every later block of the other's plan then starts and ends no later.
#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <stdexcept>

#include "tests/core/planner/exhaustive.h"
#include "tests/core/planner/exhaustive_grid.h"

namespace gradcast {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
// Pairs of a state and a next block: 3^14, 5 million, with all-reduces alone, and 5^7, 78 thousand, with all kinds.
constexpr int32_t kUnitCountMax = 14;
constexpr int32_t kUnitCountMaxAnyOp = 7;
constexpr int32_t kInFlightMax = 3;

using UnitSet = uint32_t;
using State = uint32_t;

struct Way {
  double next_launch_ns;                         // as far as the blocks before it matter
  std::array<double, kInFlightMax> finish_ns{};  // of the last blocks, the last one first
  double lateness_ns;
  int32_t block_count;
  State from;  // before the last block
  int32_t from_way;
  Op op;
};

class SetSearch {
 public:
  SetSearch(const Grid& grid, const LinkModel& link, bool any_op, bool fewest)
      : grid_(grid), link_(link), fewest_(fewest), shift_(any_op ? grid.unit_count : 0) {
    if (grid.unit_count > (any_op ? kUnitCountMaxAnyOp : kUnitCountMax)) {
      throw std::invalid_argument("too many units for a search over their sets");
    }
    if (grid.in_flight < 1 || grid.in_flight > (any_op ? 1 : kInFlightMax)) {
      throw std::invalid_argument("in_flight is out of range");
    }
    all_ = (UnitSet{1} << grid.unit_count) - 1;
    for (UnitSet units = 0; units <= all_; ++units) {
      add_content(units);
    }
  }

  ExhaustivePlan search(double lateness_ns_max) {
    ways_.assign(state_of(all_, 0) + 1, {});
    ways_[0].push_back({0, {}, grid_.backward_ns, 0, 0, -1, Op::kAllReduce});
    // Every block moves units to `done`, or leaves `done` alone and adds to `scattered`: the state grows as a number.
    for (State state = 0; state + 1 < ways_.size(); ++state) {
      const UnitSet waiting = all_ & ~done(state) & ~scattered(state);
      extend_by(state, waiting, Op::kAllReduce, lateness_ns_max);
      if (shift_ > 0) {
        extend_by(state, waiting, Op::kReduceScatter, lateness_ns_max);
        extend_by(state, scattered(state), Op::kAllGather, lateness_ns_max);
      }
    }
    return plan_of_best();
  }

 private:
  struct Content {
    double ready_ns = 0;
    int32_t unit_count = 0;
    bool one_buffer = true;
    bool packed = false;
    uint32_t complete_tensors = 0;
  };

  State state_of(UnitSet done, UnitSet scattered) const { return done << shift_ | scattered; }
  UnitSet done(State state) const { return state >> shift_; }
  UnitSet scattered(State state) const { return shift_ > 0 ? state & all_ : 0; }

  static std::vector<int32_t> units_of(UnitSet set) {
    std::vector<int32_t> units;
    for (; set != 0; set &= set - 1) {
      units.push_back(std::countr_zero(set));
    }
    return units;
  }

  void add_content(UnitSet set) {
    Content content;
    const std::vector<int32_t> units = units_of(set);
    std::vector<int32_t> sent(grid_.tensor_count(), 0);
    for (const int32_t unit : units) {
      const int32_t tensor = grid_.tensor[unit];
      content.ready_ns = std::max(content.ready_ns, grid_.ready_ns[tensor]);
      content.one_buffer = content.one_buffer && grid_.buffer[tensor] == grid_.buffer[grid_.tensor[units[0]]];
      if (++sent[tensor] == grid_.units[tensor]) {
        content.complete_tensors |= uint32_t{1} << tensor;
      }
    }
    content.unit_count = static_cast<int32_t>(units.size());
    content.packed = content.one_buffer && grid_block(grid_, units).ranges.size() > 1;
    contents_.push_back(content);
  }

  void extend_by(State state, UnitSet from, Op op, double lateness_ns_max) {
    if (ways_[state].empty() || link_.of(op).pieces.empty()) {
      return;
    }
    for (UnitSet block = from; block != 0; block = (block - 1) & from) {
      if (contents_[block].one_buffer) {
        extend(state, block, op, lateness_ns_max);
      }
    }
  }

  void extend(State state, UnitSet block, Op op, double lateness_ns_max) {
    const State next = op == Op::kReduceScatter ? state_of(done(state), scattered(state) | block)
                                                : state_of(done(state) | block, scattered(state) & ~block);
    const uint32_t arriving = contents_[done(next)].complete_tensors & ~contents_[done(state)].complete_tensors;
    double need_ns = kInfinite;  // of the most urgent tensor that arrives with this block
    for (int32_t i = 0; i < grid_.tensor_count(); ++i) {
      if ((arriving >> i & 1) != 0) {
        need_ns = std::min(need_ns, grid_.need_ns[i]);
      }
    }
    const Content& content = contents_[block];
    const double ready_ns = op == Op::kAllGather ? 0 : content.ready_ns;
    const int64_t size_bytes = content.unit_count * grid_.unit_bytes;
    const double alpha_ns = applying_piece(link_.of(op).pieces, size_bytes).alpha_ns;
    const double pack_ns_per_byte = content.packed ? link_.pack_ns_per_byte : 0;
    const double bytes_ns = grid_cost_ns(link_.of(op).pieces, size_bytes, pack_ns_per_byte) - alpha_ns;
    for (size_t w = 0; w < ways_[state].size(); ++w) {
      const Way& from = ways_[state][w];
      Way way{0, {}, 0, from.block_count + 1, state, static_cast<int32_t>(w), op};
      const double launch_ns = std::max(from.next_launch_ns, ready_ns);
      way.finish_ns[0] = std::max(launch_ns + alpha_ns, from.finish_ns[0]) + bytes_ns;
      std::copy(from.finish_ns.begin(), from.finish_ns.end() - 1, way.finish_ns.begin() + 1);
      way.next_launch_ns = std::max(launch_ns, way.finish_ns[grid_.in_flight - 1]);
      way.lateness_ns = std::max(from.lateness_ns, way.finish_ns[0] - need_ns);
      if (way.lateness_ns <= lateness_ns_max) {
        add_way(ways_[next], way);
      }
    }
  }

  bool as_good(const Way& a, const Way& b) const {
    if (a.next_launch_ns > b.next_launch_ns ||
        (fewest_ ? a.block_count > b.block_count : a.lateness_ns > b.lateness_ns)) {
      return false;
    }
    // The oldest of the last in_flight blocks matters to the next launch alone.
    for (int32_t k = 0; k + 1 < grid_.in_flight; ++k) {
      if (a.finish_ns[k] > b.finish_ns[k]) {
        return false;
      }
    }
    return true;
  }

  void add_way(std::vector<Way>& ways, const Way& way) const {
    if (std::any_of(ways.begin(), ways.end(), [&](const Way& other) { return as_good(other, way); })) {
      return;
    }
    std::erase_if(ways, [&](const Way& other) { return as_good(way, other); });
    ways.push_back(way);
  }

  ExhaustivePlan plan_of_best() const {
    ExhaustivePlan plan;
    State state = state_of(all_, 0);
    if (ways_[state].empty()) {
      return plan;
    }
    auto at = std::min_element(ways_[state].begin(), ways_[state].end(), [&](const Way& a, const Way& b) {
      return fewest_ ? a.block_count < b.block_count : a.lateness_ns < b.lateness_ns;
    });
    plan.iteration_ns = grid_.iteration_ns(at->lateness_ns);
    while (state != 0) {
      const UnitSet moved =
          at->op == Op::kReduceScatter ? scattered(state) & ~scattered(at->from) : done(state) & ~done(at->from);
      plan.blocks.push_back(grid_block(grid_, units_of(moved)));
      plan.blocks.back().op = at->op;
      state = at->from;
      at = ways_[state].begin() + std::max(at->from_way, 0);
    }
    std::reverse(plan.blocks.begin(), plan.blocks.end());
    return plan;
  }

  const Grid& grid_;
  const LinkModel& link_;
  const bool fewest_;  // blocks are counted, and lateness only has to stay within the limit; else it is minimized
  const int32_t shift_;
  UnitSet all_ = 0;
  std::vector<Content> contents_;  // by set of units, as the content of a block or as what was sent
  std::vector<std::vector<Way>> ways_;
};

}  // namespace

ExhaustivePlan best_by_sets(const Grid& grid, const LinkModel& link, bool any_op) {
  return SetSearch(grid, link, any_op, false).search(kInfinite);
}

ExhaustivePlan exhaustive_fewest(const Profile& profile, const LinkModel& link, const ExhaustiveOptions& options,
                                 double iteration_ns_max) {
  const Grid grid = make_grid(profile, link, options);
  const double lateness_ns_max = grid.lateness_ns_max(iteration_ns_max);
  return lateness_ns_max < grid.backward_ns ? ExhaustivePlan{}
                                            : SetSearch(grid, link, false, true).search(lateness_ns_max);
}

}  // namespace gradcast
