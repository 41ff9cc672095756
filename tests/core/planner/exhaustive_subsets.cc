// The search over sets of units sent. A block is any set of unsent units of one buffer, it starts as play says, when
// the link is free and everything that it touches is ready, and costs what play says. The only argument: of two ways to
// the same set the one that frees the link no later, with no greater lateness (and no more blocks), is as good, because
// every later block of the other's plan then starts and ends no later.
#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <stdexcept>
#include <utility>

#include "tests/core/planner/exhaustive.h"
#include "tests/core/planner/exhaustive_grid.h"

namespace gradcast {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
constexpr int32_t kUnitCountMax = 14;  // 3^14 pairs of a set and a next block: 5 million

using UnitSet = uint32_t;

constexpr int32_t kInFlightMax = 3;

struct Way {
  double next_launch_ns;                         // as far as the blocks before it matter
  std::array<double, kInFlightMax> finish_ns{};  // of the last blocks, the last one first
  double lateness_ns;
  int32_t block_count;
  UnitSet from;  // the set before the last block
  int32_t from_way;
};

class SubsetSearch {
 public:
  explicit SubsetSearch(const Grid& grid) : grid_(grid) {
    if (grid.unit_count > kUnitCountMax) {
      throw std::invalid_argument("too many units for a search over their sets");
    }
    if (grid.in_flight < 1 || grid.in_flight > kInFlightMax) {
      throw std::invalid_argument("in_flight is out of range");
    }
    set_count_ = UnitSet{1} << grid.unit_count;
    for (UnitSet units = 0; units < set_count_; ++units) {
      add_content(units);
    }
  }

  // Where `fewest`, blocks are counted and lateness only has to stay within the limit; else lateness is minimized.
  ExhaustivePlan search(double lateness_ns_max, bool fewest) {
    ways_.assign(set_count_, {});
    ways_[0].push_back({0, {}, grid_.backward_ns, 0, 0, -1});
    for (UnitSet sent = 0; sent + 1 < set_count_; ++sent) {
      const UnitSet rest = (set_count_ - 1) & ~sent;
      for (UnitSet block = rest; block != 0; block = (block - 1) & rest) {
        if (contents_[block].cost_ns < kInfinite) {
          extend(sent, block, lateness_ns_max, fewest);
        }
      }
    }
    return plan_of_best(fewest);
  }

 private:
  struct Content {
    double ready_ns = 0;
    double alpha_ns = 0;
    double cost_ns = 0;  // infinite if no block can carry it: units of two buffers
    uint32_t complete_tensors = 0;
  };

  std::vector<int32_t> units_of(UnitSet set) const {
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
      if (grid_.buffer[tensor] != grid_.buffer[grid_.tensor[units[0]]]) {
        content.cost_ns = kInfinite;
      }
      if (++sent[tensor] == grid_.units[tensor]) {
        content.complete_tensors |= uint32_t{1} << tensor;
      }
    }
    if (content.cost_ns == 0 && !units.empty()) {
      const bool packed = grid_block(grid_, units).ranges.size() > 1;
      content.alpha_ns = grid_.alpha_ns[units.size()];
      content.cost_ns = packed ? grid_.packed_cost_ns[units.size()] : grid_.cost_ns[units.size()];
    }
    contents_.push_back(content);
  }

  void extend(UnitSet sent, UnitSet block, double lateness_ns_max, bool fewest) {
    const uint32_t arriving = contents_[sent | block].complete_tensors & ~contents_[sent].complete_tensors;
    double need_ns = kInfinite;
    for (int32_t i = 0; i < grid_.tensor_count(); ++i) {
      if ((arriving >> i & 1) != 0) {
        need_ns = std::min(need_ns, grid_.need_ns[i]);
      }
    }
    for (size_t w = 0; w < ways_[sent].size(); ++w) {
      const Way way = next_way(ways_[sent][w], contents_[block], need_ns, sent, static_cast<int32_t>(w));
      if (way.lateness_ns <= lateness_ns_max) {
        add_way(ways_[sent | block], way, fewest);
      }
    }
  }

  Way next_way(const Way& from, const Content& block, double need_ns, UnitSet sent, int32_t from_way) const {
    Way way{0, {}, 0, from.block_count + 1, sent, from_way};
    const double launch_ns = std::max(from.next_launch_ns, block.ready_ns);
    const double bytes_begin_ns = std::max(launch_ns + block.alpha_ns, from.finish_ns[0]);
    way.finish_ns[0] = bytes_begin_ns + (block.cost_ns - block.alpha_ns);
    std::copy(from.finish_ns.begin(), from.finish_ns.end() - 1, way.finish_ns.begin() + 1);
    way.next_launch_ns = std::max(launch_ns, way.finish_ns[grid_.in_flight - 1]);
    way.lateness_ns = std::max(from.lateness_ns, way.finish_ns[0] - need_ns);
    return way;
  }

  bool as_good(const Way& a, const Way& b, bool fewest) const {
    if (a.next_launch_ns > b.next_launch_ns ||
        (fewest ? a.block_count > b.block_count : a.lateness_ns > b.lateness_ns)) {
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

  void add_way(std::vector<Way>& ways, const Way& way, bool fewest) const {
    if (std::any_of(ways.begin(), ways.end(), [&](const Way& other) { return as_good(other, way, fewest); })) {
      return;
    }
    std::erase_if(ways, [&](const Way& other) { return as_good(way, other, fewest); });
    ways.push_back(way);
  }

  ExhaustivePlan plan_of_best(bool fewest) const {
    ExhaustivePlan plan;
    UnitSet set = set_count_ - 1;
    const std::vector<Way>& ways = ways_[set];
    if (ways.empty()) {
      return plan;
    }
    auto at = std::min_element(ways.begin(), ways.end(), [&](const Way& a, const Way& b) {
      return fewest ? a.block_count < b.block_count : a.lateness_ns < b.lateness_ns;
    });
    plan.iteration_ns = grid_.iteration_ns(at->lateness_ns);
    while (set != 0) {
      plan.blocks.push_back(grid_block(grid_, units_of(set & ~at->from)));
      set = at->from;
      at = ways_[set].begin() + at->from_way;
    }
    std::reverse(plan.blocks.begin(), plan.blocks.end());
    return plan;
  }

  const Grid& grid_;
  UnitSet set_count_ = 0;
  std::vector<Content> contents_;  // by set of units, as the content of a block or as what was sent
  std::vector<std::vector<Way>> ways_;
};

}  // namespace

ExhaustivePlan exhaustive_best_by_subsets(const Profile& profile, const LinkModel& link,
                                          const ExhaustiveOptions& options) {
  const Grid grid = make_grid(profile, link, options);
  return SubsetSearch(grid).search(kInfinite, false);
}

ExhaustivePlan exhaustive_fewest_by_subsets(const Profile& profile, const LinkModel& link,
                                            const ExhaustiveOptions& options, double iteration_ns_max) {
  const Grid grid = make_grid(profile, link, options);
  const double lateness_ns_max = grid.lateness_ns_max(iteration_ns_max);
  return lateness_ns_max < grid.backward_ns ? ExhaustivePlan{} : SubsetSearch(grid).search(lateness_ns_max, true);
}

}  // namespace gradcast
