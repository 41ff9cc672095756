// The rank simulator: many ranks in virtual time. Each rank runs the live engine's follower over a network that is only
// arithmetic. So tests cover thousands of ranks, and events that come late or never.
//
// The simulator checks its rules (SimRule) while it runs, with code that it does not share with the follower, whose own
// decisions tests/engine/follower_test.cc checks. The first broken rule ends the run. If an event never comes, the run ends
// with ranks that stand still. Every random number is a function of the seed and of its use (rank, iteration, tensor or block), never of the order of
// events: the same scenario gives the same run on every machine.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "gradcast/plan.h"
#include "gradcast/profile.h"

namespace gradcast {

// How far a run deviates from the profile; all draws are uniform. With all values 0, the default, each iteration equals
// play().
struct SimJitter {
  double compute_share = 0;          // a rank computes an iteration up to this share slower
  double straggler_probability = 0;  // by rank and iteration: that it computes …
  double straggler_factor_max = 1;   // … slower by a factor of up to this
  double ready_ns_max = 0;       // each gradient exists up to so much later, so that its order differs between ranks
  double link_share = 0;         // an operation takes up to this share longer
  double completion_ns_max = 0;  // a rank hears of the end of an operation up to so much later
  double late_probability = 0;   // by gradient and by completion: that its event comes …
  double late_ns_max = 0;        // … up to so much later still
};

// One thing that goes wrong.
struct SimFault {
  enum class Kind {
    kLoseReady,       // the event of a gradient never comes; subject: the tensor
    kLoseCompletion,  // the end of an operation is never told to this rank; subject: the block
    kKeepOldPlan,     // in this iteration the rank follows the plan of the iteration before
    kLeave,           // the rank is gone from time_ns on, and operations on the network at that time fail with it
  };
  Kind kind = Kind::kLeave;
  int32_t rank = 0;
  int32_t iteration = 0;
  int32_t subject = 0;
  double time_ns = 0;  // of kLeave, from the start of the first iteration

  bool hits(Kind what, int32_t of_rank, int32_t in_iteration, int32_t of_subject) const {
    return kind == what && rank == of_rank && iteration == in_iteration && subject == of_subject;
  }
};

// From this iteration on, plans[plan] is in force.
struct SimPlanChange {
  int32_t iteration = 0;
  int32_t plan = 0;
};

struct SimScenario {
  Profile profile;  // with the link; its world_size does not count
  // The first is in force from the start. They are not checked against the profile, because finding a byte that travels
  // twice is the simulator's own task.
  std::vector<Plan> plans;
  std::vector<SimPlanChange> changes;  // ascending
  int32_t rank_count = 2;
  int32_t iteration_count = 1;
  uint64_t seed = 0;
  SimJitter jitter;
  std::vector<SimFault> faults;
  bool keep_launches = false;  // SimRankResult.launches: of small runs, for tests and pictures

  // The plan on which ranks agree for an iteration.
  int32_t plan_in(int32_t iteration) const {
    int32_t plan = 0;
    for (const SimPlanChange& change : changes) {
      plan = change.iteration <= iteration ? change.plan : plan;
    }
    return plan;
  }
};

// The rules that hold in every run.
enum class SimRule {
  kSameOperation,  // the k-th operation carries the same bytes of the same iteration on every rank
  kEveryByte,      // every byte is reduced exactly once and finished exactly once per iteration
  kEnds,           // a run has no more events than its iterations, tensors and blocks can cause
  kFollower,       // the follower's own checks
};

// A broken rule. -1 if it concerns no particular rank or block.
struct SimFinding {
  SimRule rule = SimRule::kEnds;
  int32_t rank = -1;
  int32_t other_rank = -1;  // of kSameOperation: who started the operation first
  int32_t iteration = -1;
  int32_t block = -1;
  std::string text;  // for people
};

struct SimLaunch {
  int32_t iteration = 0;
  int32_t block = 0;
  bool operator==(const SimLaunch&) const = default;
};

struct SimRankResult {
  enum class Outcome {
    kFinished,    // all iterations
    kStoodStill,  // unfinished when no event was left
    kLeft,
    kStopped,  // by a broken rule
  };
  Outcome outcome = Outcome::kStopped;
  int64_t launch_count = 0;
  uint64_t order_hash = 0;            // of what was launched, in order: equal on all ranks that finished
  int64_t reduced_bytes = 0;          // by ended all-reduces and reduce-scatters, all iterations
  double finish_ns = 0;               // of its last iteration that ended
  std::vector<SimLaunch> launches{};  // if kept
};

struct SimResult {
  std::vector<SimRankResult> ranks;
  std::vector<double> iteration_end_ns;  // on the last rank, of the iterations that ended on all
  std::optional<SimFinding> finding;
  double end_ns = 0;  // of the last event
  int64_t event_count = 0;
  int64_t operation_count = 0;  // that all ranks started
  int64_t queue_peak = 0;       // events that waited at once
};

// Throws Error: kInvalidProfile, kInvalidLink (also a kind of operation of a plan that the link does not know),
// kInvalidPlan (a plan that no follower can follow). REQUIRES: faults and changes name ranks, iterations and plans that
// exist, and every reduce-scatter is gathered; only tests write scenarios.
SimResult simulate(const SimScenario& scenario);

}  // namespace gradcast
