// play: the one definition of what a plan costs. The planner searches with it, the simulator repeats it with jitter and
// many ranks, and the live timeline is checked against it.
//
// Backward runs from 0 to B; tensor i is ready at ready[i]. Block k is launched at the latest of: the launch of k-1,
// the finish of k-in_flight, the ready time of every tensor that it touches (an all-gather instead: the finish of every
// reduce-scatter that shares a byte with it). Its bytes begin at max(launch + alpha, finish of k-1) and end beta *
// bytes later: one wire, in launch order. A tensor arrives when the last all-reduce or all-gather that touches it
// finishes; part arrival has no effect. Updates run where forward runs. Overlap mode: forward starts at B; at each need
// point its clock becomes max(clock + compute since the last need point, arrival) + update. Hook mode: forward starts
// at max(B, last finish) + all updates and never waits.
//
// The optimizer's step runs in parts: forward that comes to a tensor which had not arrived at the last part updates all
// that has arrived by then, and each part but the first costs part_ns on its clock. A host that runs ahead of its device
// needs host_step_ns + host_part_ns per further part + host_block_ns per block for an iteration; the slower of the two
// decides. Its parts are those of a host that is not ahead where its step begins. One that is sees fewer arrivals and
// makes more parts, but has the time for them.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "gradcast/plan.h"
#include "gradcast/profile.h"

namespace gradcast {

struct BlockTimes {
  double ready_ns = 0;   // everything that it waits for exists
  double launch_ns = 0;  // the operation begins
  double finish_ns = 0;
};

struct TensorTimes {
  double arrival_ns = 0;  // from the start of backward
  double read_ns = 0;     // when forward reaches it, before waiting; from the start of backward
  double wait_ns = 0;     // how long forward stands still for it; 0 in hook mode, where the wait is before forward
};

struct Timeline {
  std::vector<BlockTimes> blocks;    // as in the plan
  std::vector<TensorTimes> tensors;  // as in the profile
  double forward_start_ns = 0;
  double iteration_ns = 0;  // from the start of backward to the end of the next forward
  double exposed_ns = 0;    // what communication costs: waits of forward, and parts of the optimizer's step
  double host_ns = 0;       // the host's own work, where it runs ahead of a device
  int32_t parts = 0;        // of the optimizer's step
};

// REQUIRES: check_plan(plan, profile) passed. Throws Error{kInvalidLink} if `link` lacks a kind of operation of the
// plan.
Timeline play(const Profile& profile, const LinkModel& link, const Plan& plan);

}  // namespace gradcast
