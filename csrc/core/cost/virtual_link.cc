#include "cost/virtual_link.h"

#include <algorithm>

namespace gradcast {

double VirtualLink::free_ns() const {
  const auto in_flight = static_cast<size_t>(problem_->in_flight);
  const double credit_ns = finish_ns_.size() >= in_flight ? finish_ns_[finish_ns_.size() - in_flight] : 0;
  return std::max(launch_ns_, credit_ns);
}

double VirtualLink::launch(double now_ns, int64_t size_bytes, Op op, bool packed) {
  const BlockCost cost = block_cost(problem_->link, op, size_bytes, packed);
  const double wire_free_ns = finish_ns_.empty() ? 0 : finish_ns_.back();
  launch_ns_ = std::max(now_ns, free_ns());
  finish_ns_.push_back(std::max(launch_ns_ + cost.alpha_ns, wire_free_ns) + cost.bytes_ns);
  return finish_ns_.back();
}

}  // namespace gradcast
