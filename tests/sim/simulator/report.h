// Reports on ranks that stand still, and descriptions of blocks.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/follower.h"
#include "tests/sim/simulator/network.h"
#include "tests/sim/simulator/plan_schedule.h"
#include "tests/sim/simulator/rank.h"
#include "tests/sim/simulator/simulate.h"

namespace gradcast::sim {

// "block 3 of 7 (layer4.conv2.weight … fc.bias, 12.4 MB)", counted from 1, as in the engine's messages.
std::string block_text(const FollowedPlan& plan, int32_t block);

// One report for each rank that has neither finished nor left. REQUIRES: no event is left, and no rule is broken.
std::vector<SimStandstill> standstills(const std::vector<Rank>& ranks, const Network& network,
                                       const PlanSchedule& schedule);

}  // namespace gradcast::sim
