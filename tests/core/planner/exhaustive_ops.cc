// The search over sets of units for all kinds of operation: each unit waits, is reduce-scattered, or is done, by an
// all-gather or an all-reduce. With one block in flight an all-gather has nothing to wait for but the link. The only
// argument is the one of exhaustive_subsets.cc.
#include <algorithm>
#include <bit>
#include <limits>
#include <stdexcept>

#include "tests/core/planner/exhaustive.h"
#include "tests/core/planner/exhaustive_grid.h"

namespace gradcast {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
constexpr int32_t kUnitCountMax = 7;  // 5^7 pairs of a state and a next block: 78 thousand

using UnitSet = uint32_t;

struct Way {
  double free_ns;
  double lateness_ns;
  UnitSet from;  // the state before the last block
  int32_t from_way;
  Op op;
};

class OpSearch {
 public:
  OpSearch(const Grid& grid, const LinkModel& link) : grid_(grid), link_(link) {
    if (grid.unit_count > kUnitCountMax || grid.in_flight != 1) {
      throw std::invalid_argument("at most 7 units and one block in flight are expected");
    }
    all_ = (UnitSet{1} << grid.unit_count) - 1;
  }

  ExhaustivePlan best() {
    ways_.assign(state_of(all_, 0) + 1, {});
    ways_[0].push_back({0, grid_.backward_ns, 0, -1, Op::kAllReduce});
    // Every block moves units to `done`, or leaves `done` alone and adds to `scattered`: the state grows as a number.
    for (UnitSet state = 0; state + 1 < ways_.size(); ++state) {
      const UnitSet waiting = all_ & ~done(state) & ~scattered(state);
      extend_by_subsets(state, waiting, Op::kAllReduce);
      extend_by_subsets(state, waiting, Op::kReduceScatter);
      extend_by_subsets(state, scattered(state), Op::kAllGather);
    }
    return plan_of_best();
  }

 private:
  UnitSet state_of(UnitSet done, UnitSet scattered) const { return done << grid_.unit_count | scattered; }
  UnitSet done(UnitSet state) const { return state >> grid_.unit_count; }
  UnitSet scattered(UnitSet state) const { return state & all_; }

  static std::vector<int32_t> units_of(UnitSet set) {
    std::vector<int32_t> units;
    for (; set != 0; set &= set - 1) {
      units.push_back(std::countr_zero(set));
    }
    return units;
  }

  void extend_by_subsets(UnitSet state, UnitSet from, Op op) {
    if (ways_[state].empty() || link_.of(op).pieces.empty()) {
      return;
    }
    for (UnitSet block = from; block != 0; block = (block - 1) & from) {
      extend(state, block, op);
    }
  }

  void extend(UnitSet state, UnitSet block, Op op) {
    const std::vector<int32_t> units = units_of(block);
    double ready_ns = 0;
    for (const int32_t unit : units) {
      if (grid_.buffer[grid_.tensor[unit]] != grid_.buffer[grid_.tensor[units[0]]]) {
        return;
      }
      ready_ns = op == Op::kAllGather ? 0 : std::max(ready_ns, grid_.ready_ns[grid_.tensor[unit]]);
    }
    const double pack_ns_per_byte = grid_block(grid_, units).ranges.size() > 1 ? link_.pack_ns_per_byte : 0;
    const int64_t size_bytes = static_cast<int64_t>(units.size()) * grid_.unit_bytes;
    const double cost_ns = grid_cost_ns(link_.of(op).pieces, size_bytes, pack_ns_per_byte);
    const UnitSet next = op == Op::kReduceScatter ? state_of(done(state), scattered(state) | block)
                                                  : state_of(done(state) | block, scattered(state) & ~block);
    const double need_ns = need_of_arriving_ns(done(state), done(next));
    for (size_t w = 0; w < ways_[state].size(); ++w) {
      const Way& from = ways_[state][w];
      const double finish_ns = std::max(from.free_ns, ready_ns) + cost_ns;
      const double lateness_ns = std::max(from.lateness_ns, finish_ns - need_ns);
      add_way(ways_[next], {finish_ns, lateness_ns, state, static_cast<int32_t>(w), op});
    }
  }

  // The need of the most urgent tensor that is complete after but not before; infinite if there is none.
  double need_of_arriving_ns(UnitSet before, UnitSet after) const {
    double need_ns = kInfinite;
    for (int32_t i = 0; i < grid_.tensor_count(); ++i) {
      const UnitSet tensor = ((UnitSet{1} << grid_.units[i]) - 1) << grid_.first_unit[i];
      if ((after & tensor) == tensor && (before & tensor) != tensor) {
        need_ns = std::min(need_ns, grid_.need_ns[i]);
      }
    }
    return need_ns;
  }

  static void add_way(std::vector<Way>& ways, const Way& way) {
    const auto as_good = [](const Way& a, const Way& b) {
      return a.free_ns <= b.free_ns && a.lateness_ns <= b.lateness_ns;
    };
    if (std::any_of(ways.begin(), ways.end(), [&](const Way& other) { return as_good(other, way); })) {
      return;
    }
    std::erase_if(ways, [&](const Way& other) { return as_good(way, other); });
    ways.push_back(way);
  }

  ExhaustivePlan plan_of_best() const {
    const auto less_late = [](const Way& a, const Way& b) { return a.lateness_ns < b.lateness_ns; };
    const Way* way = &*std::min_element(ways_.back().begin(), ways_.back().end(), less_late);
    ExhaustivePlan plan;
    plan.iteration_ns = grid_.iteration_ns(way->lateness_ns);
    for (UnitSet state = state_of(all_, 0); state != 0;) {
      const UnitSet moved =
          way->op == Op::kReduceScatter ? scattered(state) & ~scattered(way->from) : done(state) & ~done(way->from);
      plan.blocks.push_back(grid_block(grid_, units_of(moved)));
      plan.blocks.back().op = way->op;
      state = way->from;
      way = &ways_[state][std::max(way->from_way, 0)];
    }
    std::reverse(plan.blocks.begin(), plan.blocks.end());
    return plan;
  }

  const Grid& grid_;
  const LinkModel& link_;
  UnitSet all_ = 0;
  std::vector<std::vector<Way>> ways_;
};

}  // namespace

ExhaustivePlan exhaustive_best_any_op(const Profile& profile, const LinkModel& link, const ExhaustiveOptions& options) {
  const Grid grid = make_grid(profile, link, options);
  return OpSearch(grid, link).best();
}

}  // namespace gradcast
