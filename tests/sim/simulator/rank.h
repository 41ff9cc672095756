// One rank: the live engine's follower, and around it what a training process would be, a backward and a forward pass.
//
// Thread safety: pure; any thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "engine/follower.h"
#include "gradcast/profile.h"
#include "tests/sim/simulator/draws.h"
#include "tests/sim/simulator/simulate.h"

namespace gradcast::sim {

// The backward pass of one iteration: when each gradient is ready, and when the pass ends. Draws depend on rank,
// iteration and tensor only, so a gradient has the same time in whatever order events come.
class Backward {
 public:
  struct Gradient {
    double time_ns = 0;
    int32_t tensor = 0;
    auto operator<=>(const Gradient&) const = default;
  };

  void begin(const SimScenario& scenario, const Draws& draws, int32_t rank, int32_t iteration, double now_ns) {
    using enum Draws::For;
    const SimJitter& jitter = scenario.jitter;
    const Draws::Place here{rank, iteration, 0};
    factor_ = 1 + jitter.compute_share * draws.share(kCompute, here);
    if (draws.share(kStraggler, here) < jitter.straggler_probability) {
      factor_ *= 1 + (jitter.straggler_factor_max - 1) * draws.share(kStragglerFactor, here);
    }
    end_ns_ = now_ns + factor_ * scenario.profile.backward_ns;
    gradients_.clear();
    next_ = 0;
    for (size_t i = 0; i < scenario.profile.tensors.size(); ++i) {
      const auto tensor = static_cast<int32_t>(i);
      const bool is_lost = std::ranges::any_of(scenario.faults, [&](const SimFault& fault) {
        return fault.hits(SimFault::Kind::kLoseReady, rank, iteration, tensor);
      });
      const Draws::Place place{rank, iteration, tensor};
      double time_ns = now_ns + factor_ * scenario.profile.tensors[i].ready_ns;
      time_ns += jitter.ready_ns_max * draws.share(kReady, place);
      if (draws.share(kReadyIsLate, place) < jitter.late_probability) {
        time_ns += jitter.late_ns_max * draws.share(kReadyLate, place);
      }
      if (!is_lost) {
        gradients_.push_back({time_ns, tensor});
      }
    }
    std::ranges::sort(gradients_);
  }

  // Takes the next gradient in order of time. Only one per rank is in the event queue, which would otherwise grow with
  // ranks times tensors.
  std::optional<Gradient> next() {
    return next_ == gradients_.size() ? std::nullopt : std::optional(gradients_[next_++]);
  }

  double end_ns() const { return end_ns_; }
  // How much slower than the profile this rank computes in this iteration, forward too.
  double factor() const { return factor_; }

 private:
  double end_ns_ = 0;
  double factor_ = 1;
  std::vector<Gradient> gradients_;  // by time, then tensor
  size_t next_ = 0;
};

// The forward pass: how far it has come, and when it ends. It waits for nothing but tensors, so it is computed when
// they arrive and needs no events of its own. The same arithmetic as in csrc/core/cost/play.cc, one arrival at a time, and
// written a second time on purpose.
class Forward {
 public:
  // Backward ends at backward_end_ns; forward then takes its time multiplied by `factor`.
  void begin(Mode mode, double backward_end_ns, double factor) {
    mode_ = mode;
    factor_ = factor;
    clock_ns_ = backward_end_ns;
    passed_need_ns_ = 0;
    next_read_ = 0;
    has_ended_ = false;
  }

  // Goes on as far as what has arrived allows. REQUIRES: called at once when something arrives, which is at now_ns.
  void advance(const Profile& profile, const Follower& follower, bool all_finished, double now_ns) {
    if (has_ended_ || (mode_ == Mode::kHook && !all_finished)) {
      return;
    }
    const auto tensor_count = static_cast<int32_t>(profile.tensors.size());
    if (mode_ == Mode::kHook) {
      clock_ns_ = std::max(clock_ns_, now_ns);
    }
    // A tensor that arrived before one that is read earlier made nobody wait: the clock is past its arrival then.
    for (; next_read_ < tensor_count && follower.progress_of(next_read_) == Progress::kArrived; ++next_read_) {
      const Tensor& tensor = profile.tensors[next_read_];
      clock_ns_ = std::max(clock_ns_ + factor_ * (tensor.need_ns - passed_need_ns_), now_ns);
      clock_ns_ += factor_ * tensor.update_ns;
      passed_need_ns_ = tensor.need_ns;
    }
    if (next_read_ == tensor_count) {
      clock_ns_ += factor_ * (profile.forward_ns - passed_need_ns_);
      has_ended_ = true;
    }
  }

  bool has_ended() const { return has_ended_; }
  // REQUIRES: has_ended().
  double end_ns() const { return clock_ns_; }

 private:
  Mode mode_ = Mode::kOverlap;
  double factor_ = 1;
  double clock_ns_ = 0;
  double passed_need_ns_ = 0;
  int32_t next_read_ = 0;
  bool has_ended_ = false;
};

struct Rank {
  Follower follower;
  Backward backward;
  Forward forward;

  int32_t iteration = -1;
  int32_t plan = 0;             // in force, as an index into PlanSchedule::all()
  int64_t first_operation = 0;  // of this iteration: block k is the operation first_operation + k, as in the engine
  int32_t launched_count = 0;   // of this iteration, as is the next
  int32_t finished_count = 0;
  bool has_left = false;
  bool has_finished = false;

  bool all_finished() const { return finished_count == follower.plan().block_count(); }
};

}  // namespace gradcast::sim
