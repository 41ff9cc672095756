// Costs and contents of blocks are worked out once per plan: with thousands of ranks nothing may be done per rank.
#include "tests/sim/simulator/plan_schedule.h"

#include <algorithm>
#include <string>
#include <string_view>

#include "gradcast/error.h"
#include "tests/sim/simulator/draws.h"

namespace gradcast::sim {
namespace {

uint64_t content_of(const Block& block) {
  uint64_t content = mixed(static_cast<uint64_t>(block.op) << 32 | static_cast<uint32_t>(block.buffer));
  for (const Range& range : block.ranges) {
    content = mixed(content + static_cast<uint64_t>(range.lo_bytes));
    content = mixed(content + static_cast<uint64_t>(range.hi_bytes));
  }
  return content;
}

SimPlan::Cost cost_of(const LinkModel& link, const Block& block, int64_t size_bytes) {
  const OpCost& cost = link.of(block.op);
  if (!cost.available()) {
    throw Error(ErrorCode::kInvalidLink,
                "a plan has a " + std::string(to_string(block.op)) + ", which the profile's link does not know");
  }
  const LinkPiece& piece = cost.piece(size_bytes);
  const double pack_ns_per_byte = block.ranges.size() > 1 ? link.pack_ns_per_byte : 0;
  return {piece.alpha_ns, (piece.beta_ns_per_byte + pack_ns_per_byte) * static_cast<double>(size_bytes)};
}

}  // namespace

PlanSchedule::PlanSchedule(const SimScenario& scenario) : scenario_(scenario) {
  for (const Plan& plan : scenario.plans) {
    SimPlan& made = plans_.emplace_back();
    made.followed = std::make_shared<const FollowedPlan>(scenario.profile, plan);
    for (const Block& block : plan.blocks) {
      made.contents.push_back(content_of(block));
      made.size_bytes.push_back(block.size_bytes());
      made.costs.push_back(cost_of(scenario.profile.link, block, made.size_bytes.back()));
    }
  }
  is_disputed_ = std::ranges::any_of(scenario.faults,
                                     [](const SimFault& fault) { return fault.kind == SimFault::Kind::kKeepOldPlan; });
}

int32_t PlanSchedule::in_force(int32_t rank, int32_t iteration) const {
  const bool keeps =
      is_disputed_ && std::ranges::any_of(scenario_.faults, [&](const SimFault& fault) {
        return fault.kind == SimFault::Kind::kKeepOldPlan && fault.rank == rank && fault.iteration == iteration;
      });
  return agreed(keeps ? iteration - 1 : iteration);
}

int32_t PlanSchedule::agreed(int32_t iteration) const {
  int32_t plan = 0;
  for (const SimPlanChange& change : scenario_.changes) {
    if (change.iteration <= iteration) {
      plan = change.plan;
    }
  }
  return plan;
}

}  // namespace gradcast::sim
