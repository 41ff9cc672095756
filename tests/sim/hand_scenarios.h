// Scenarios written by hand: few tensors, elements of one byte, a link of alpha 5 ns and 1 ns per byte.
//
// Thread safety: pure; any thread.
#pragma once

#include <vector>

#include "tests/core/hand_profiles.h"
#include "tests/sim/simulator/simulate.h"

namespace gradcast {

// Tensors of 10, 20 and 30 bytes, at 0, 10 and 30, which backward (100 ns) reaches last to first and forward (60 ns)
// first to last.
inline Profile three_layers() {
  Profile profile = profile_of(100, 60, {{10, 100, 0}, {20, 70, 20}, {30, 30, 40}});
  profile.link = link_of(5, 1);
  return profile;
}

// One block per tensor, in the order in which backward gives them.
inline Plan layer_by_layer(int32_t in_flight = 1) {
  return plan_of({block_of({{30, 60}}), block_of({{10, 30}}), block_of({{0, 10}})}, Mode::kOverlap, in_flight);
}

inline SimScenario scenario_of(const Profile& profile, const std::vector<Plan>& plans, int32_t rank_count,
                               int32_t iteration_count) {
  SimScenario scenario;
  scenario.profile = profile;
  scenario.plans = plans;
  scenario.rank_count = rank_count;
  scenario.iteration_count = iteration_count;
  scenario.keep_launches = true;
  return scenario;
}

}  // namespace gradcast
