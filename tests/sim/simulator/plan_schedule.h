// Which plan each rank follows in each iteration. All ranks share one copy of the plans, worked out once.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/follower.h"
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
  // REQUIRES: a checked scenario, which must outlive this. Throws Error{kInvalidLink}, Error{kInvalidPlan}.
  explicit PlanSchedule(const SimScenario& scenario);

  // The plan that a rank follows in an iteration: an index into all().
  int32_t in_force(int32_t rank, int32_t iteration) const;
  const std::vector<SimPlan>& all() const { return plans_; }

 private:
  int32_t agreed(int32_t iteration) const;

  const SimScenario& scenario_;
  std::vector<SimPlan> plans_;
  bool is_disputed_ = false;  // some rank keeps an old plan somewhere
};

}  // namespace gradcast::sim
