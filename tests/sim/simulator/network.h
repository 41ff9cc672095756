// The network. It matches the k-th operation of each rank with the k-th of all others and computes when it ends.
//
// Process groups match operations in the same way, which is why the order must be the same on all ranks. An operation
// begins when the last rank has started it. From then on the network is the link of play(): one wire, in the order of
// operations. Operations stay in a queue from their first launch until every rank has been told of their end.
//
// Thread safety: pure; any thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>

#include "gradcast/error.h"
#include "tests/sim/simulator/plan_schedule.h"

namespace gradcast::sim {

// One operation, from its first launch until every rank that was told of its end has been told.
struct Operation {
  int32_t iteration = 0;
  int32_t plan = 0;
  int32_t block = 0;
  int32_t first_rank = 0;
  int32_t launch_count = 0;
  int32_t untold_count = 0;     // ranks that have not been told of its end
  int32_t failed_by_rank = -1;  // that left while it was on the network
  double end_ns = 0;            // on the wire; once all have launched it
};

class Network {
 public:
  Network(const SimScenario& scenario, const PlanSchedule& schedule)
      : rank_count_(scenario.rank_count), schedule_(schedule) {}

  // The operation that carries this block is the rank's number `index`. The first rank to launch it creates it; the
  // others join. It stays where it is until all are told of its end. REQUIRES: each rank launches 0, 1, 2, … in order.
  Operation& launch(int64_t index, int32_t rank, int32_t iteration, int32_t plan, int32_t block) {
    const auto at = static_cast<size_t>(index - first_open_);
    GC_CHECK(index >= first_open_ && at <= open_.size());
    if (at == open_.size()) {
      open_.push_back({iteration, plan, block, rank, 0, rank_count_, -1, 0});
    }
    ++open_[at].launch_count;
    return open_[at];
  }
  // Whether this block is what others have launched as this operation.
  bool is_same(const Operation& operation, int32_t iteration, int32_t plan, int32_t block) const {
    // Equal bytes of another iteration would add gradients of different steps.
    return operation.iteration == iteration &&
           schedule_.all()[operation.plan].contents[operation.block] == schedule_.all()[plan].contents[block];
  }
  bool is_complete(const Operation& operation) const { return operation.launch_count == rank_count_; }

  // Puts a complete operation on the wire; its times are multiplied by the factors. alpha may pass while the operation
  // before is on the wire, the bytes may not: play()'s link.
  void start(Operation& operation, double now_ns, double alpha_factor, double bytes_factor) {
    GC_CHECK(is_complete(operation));
    const SimPlan::Cost& cost = schedule_.all()[operation.plan].costs[operation.block];
    wire_free_ns_ = std::max(now_ns + alpha_factor * cost.alpha_ns, wire_free_ns_) + bytes_factor * cost.bytes_ns;
    operation.end_ns = wire_free_ns_;
    ++started_count_;
  }
  // One rank was told, or is not there any more. Forgets operations of whose end all have been told.
  void tell(int64_t index) {
    if (!is_open(index)) {
      return;
    }
    --open_[static_cast<size_t>(index - first_open_)].untold_count;
    while (!open_.empty() && open_.front().untold_count <= 0) {
      open_.pop_front();
      ++first_open_;
    }
  }
  // The rank is gone: what is on the wire fails.
  void leave(int32_t rank, double now_ns) {
    for (Operation& operation : open_) {
      if (is_complete(operation) && operation.end_ns > now_ns && operation.failed_by_rank < 0) {
        operation.failed_by_rank = rank;
      }
    }
  }

  // REQUIRES: launched by some rank, and not told to all.
  const Operation& at(int64_t index) const { return open_[static_cast<size_t>(index - first_open_)]; }
  bool is_open(int64_t index) const {
    return index >= first_open_ && index < first_open_ + static_cast<int64_t>(open_.size());
  }

  int64_t started_count() const { return started_count_; }

 private:
  const int32_t rank_count_;
  const PlanSchedule& schedule_;
  std::deque<Operation> open_;
  int64_t first_open_ = 0;
  int64_t started_count_ = 0;
  double wire_free_ns_ = 0;
};

}  // namespace gradcast::sim
