// Operations stay in a queue from their first launch until every rank has been told of their end.
#include "tests/sim/simulator/network.h"

#include "gradcast/error.h"

namespace gradcast::sim {

// The first rank to launch number `index` creates the operation; the others join it.
Operation& Network::launch(int64_t index, int32_t rank, int32_t iteration, int32_t plan, int32_t block) {
  const auto at = static_cast<size_t>(index - first_open_);
  GC_CHECK(index >= first_open_ && at <= open_.size());
  if (at == open_.size()) {
    open_.push_back({iteration, plan, block, rank, 0, rank_count_, -1, 0});
    open_peak_ = std::max(open_peak_, static_cast<int64_t>(open_.size()));
  }
  ++open_[at].launch_count;
  return open_[at];
}

bool Network::is_same(const Operation& operation, int32_t iteration, int32_t plan, int32_t block) const {
  // Equal bytes of another iteration would add gradients of different steps.
  return operation.iteration == iteration &&
         schedule_.all()[operation.plan].contents[operation.block] == schedule_.all()[plan].contents[block];
}

// alpha may pass while the operation before is on the wire, the bytes may not: play()'s link.
void Network::start(Operation& operation, double now_ns, double alpha_factor, double bytes_factor) {
  GC_CHECK(is_complete(operation));
  const SimPlan::Cost& cost = schedule_.all()[operation.plan].costs[operation.block];
  wire_free_ns_ = std::max(now_ns + alpha_factor * cost.alpha_ns, wire_free_ns_) + bytes_factor * cost.bytes_ns;
  operation.end_ns = wire_free_ns_;
  ++started_count_;
}

// Forgets operations from the front, once all ranks have been told of their end.
void Network::tell(int64_t index) {
  if (!is_open(index)) {
    return;
  }
  --open_[static_cast<size_t>(index - first_open_)].untold_count;
  while (!open_.empty() && open_.front().untold_count <= 0) {
    open_.pop_front();
    ++first_open_;
  }
}

void Network::leave(int32_t rank, double now_ns) {
  for (Operation& operation : open_) {
    if (is_complete(operation) && operation.end_ns > now_ns && operation.failed_by_rank < 0) {
      operation.failed_by_rank = rank;
    }
  }
}

}  // namespace gradcast::sim
