// Draws depend on rank, iteration and tensor only, so a gradient has the same time in whatever order events come.
#include "tests/sim/simulator/backward.h"

#include <algorithm>

namespace gradcast::sim {
namespace {

double compute_factor(const SimJitter& jitter, const Draws& draws, Draws::Place place) {
  using enum Draws::For;
  const double factor = 1 + jitter.compute_share * draws.share(kCompute, place);
  if (draws.share(kStraggler, place) >= jitter.straggler_probability) {
    return factor;
  }
  return factor * (1 + (jitter.straggler_factor_max - 1) * draws.share(kStragglerFactor, place));
}

double event_delay_ns(const SimJitter& jitter, const Draws& draws, Draws::Place place) {
  using enum Draws::For;
  const double delay_ns = jitter.ready_ns_max * draws.share(kReady, place);
  const bool is_late = draws.share(kReadyIsLate, place) < jitter.late_probability;
  return delay_ns + (is_late ? jitter.late_ns_max * draws.share(kReadyLate, place) : 0);
}

}  // namespace

void Backward::begin(const SimScenario& scenario, const Draws& draws, int32_t rank, int32_t iteration, double now_ns) {
  factor_ = compute_factor(scenario.jitter, draws, {rank, iteration, 0});
  end_ns_ = now_ns + factor_ * scenario.profile.backward_ns;
  gradients_.clear();
  next_ = 0;
  for (size_t i = 0; i < scenario.profile.tensors.size(); ++i) {
    const auto tensor = static_cast<int32_t>(i);
    const double delay_ns = event_delay_ns(scenario.jitter, draws, {rank, iteration, tensor});
    gradients_.push_back({now_ns + factor_ * scenario.profile.tensors[i].ready_ns + delay_ns, tensor});
  }
  for (const SimFault& fault : scenario.faults) {
    if (fault.kind == SimFault::Kind::kLoseReady && fault.rank == rank && fault.iteration == iteration) {
      std::erase_if(gradients_, [&](const Gradient& gradient) { return gradient.tensor == fault.subject; });
    }
  }
  std::ranges::sort(gradients_, [](const Gradient& a, const Gradient& b) {
    return a.time_ns != b.time_ns ? a.time_ns < b.time_ns : a.tensor < b.tensor;
  });
}

std::optional<Backward::Gradient> Backward::next() {
  return next_ == gradients_.size() ? std::nullopt : std::optional(gradients_[next_++]);
}

}  // namespace gradcast::sim
