// Which plan each rank follows in each iteration. All ranks share one copy of the plans, whose costs and contents are
// worked out once: with thousands of ranks nothing may be done per rank.
//
// Thread safety: pure; any thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/follower.h"
#include "gradcast/error.h"
#include "tests/sim/simulator/draws.h"
#include "tests/sim/simulator/simulate.h"

namespace gradcast::sim {

struct SimPlan {
  struct Cost {
    double alpha_ns = 0;
    double bytes_ns = 0;
  };
  std::shared_ptr<const FollowedPlan> followed;

  // By block.
  std::vector<uint64_t> contents;  // equal for blocks of any plan that carry the same bytes by the same operation
  std::vector<int64_t> size_bytes;
  std::vector<Cost> costs;
};

class PlanSchedule {
 public:
  // REQUIRES: the scenario outlives this. Throws Error{kInvalidLink}, Error{kInvalidPlan}.
  explicit PlanSchedule(const SimScenario& scenario) : scenario_(scenario) {
    for (const Plan& plan : scenario.plans) {
      SimPlan& made = plans_.emplace_back();
      made.followed = std::make_shared<const FollowedPlan>(scenario.profile, plan);
      for (const Block& block : plan.blocks) {
        made.contents.push_back(content_of(block));
        made.size_bytes.push_back(block.size_bytes());
        made.costs.push_back(cost_of(scenario.profile.link, block));
      }
    }
  }

  // The plan that a rank follows in an iteration: an index into all().
  int32_t in_force(int32_t rank, int32_t iteration) const {
    const bool keeps = std::ranges::any_of(scenario_.faults, [&](const SimFault& fault) {
      return fault.hits(SimFault::Kind::kKeepOldPlan, rank, iteration, fault.subject);
    });
    return scenario_.plan_in(keeps ? iteration - 1 : iteration);
  }
  const std::vector<SimPlan>& all() const { return plans_; }

 private:
  static uint64_t content_of(const Block& block) {
    uint64_t content = mixed(static_cast<uint64_t>(block.op) << 32 | static_cast<uint32_t>(block.buffer));
    for (const Range& range : block.ranges) {
      content = mixed(content + static_cast<uint64_t>(range.lo_bytes));
      content = mixed(content + static_cast<uint64_t>(range.hi_bytes));
    }
    return content;
  }

  static SimPlan::Cost cost_of(const LinkModel& link, const Block& block) {
    const OpCost& cost = link.of(block.op);
    if (!cost.available()) {
      throw Error(ErrorCode::kInvalidLink,
                  "a plan has a " + std::string(to_string(block.op)) + ", which the profile's link does not know");
    }
    const LinkPiece& piece = cost.piece(block.size_bytes());
    const double pack_ns_per_byte = block.ranges.size() > 1 ? link.pack_ns_per_byte : 0;
    return {piece.alpha_ns, (piece.beta_ns_per_byte + pack_ns_per_byte) * static_cast<double>(block.size_bytes())};
  }

  const SimScenario& scenario_;
  std::vector<SimPlan> plans_;
};

}  // namespace gradcast::sim
