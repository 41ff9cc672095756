// One rank: the live engine's follower, and around it what a training process would be.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>

#include "engine/follower.h"
#include "tests/sim/simulator/backward.h"
#include "tests/sim/simulator/forward.h"
#include "tests/sim/simulator/rank_checker.h"
#include "tests/sim/simulator/simulate.h"

namespace gradcast::sim {

struct Rank {
  Follower follower;
  RankChecker checker;
  Backward backward;
  Forward forward;

  int32_t iteration = -1;
  int32_t plan = 0;             // in force, as an index into PlanSchedule::all()
  int64_t first_operation = 0;  // of this iteration: block k is the operation first_operation + k, as in the engine
  bool has_left = false;
  bool has_finished = false;

  int64_t launched_count() const { return first_operation + (iteration < 0 ? 0 : checker.launched_count()); }
};

}  // namespace gradcast::sim
