// The same arithmetic as in csrc/core/cost/play.cc, one arrival at a time, and written a second time on purpose.
#include "tests/sim/simulator/forward.h"

#include <algorithm>

namespace gradcast::sim {

void Forward::begin(Mode mode, double backward_end_ns, double factor) {
  mode_ = mode;
  factor_ = factor;
  clock_ns_ = backward_end_ns;
  passed_need_ns_ = 0;
  next_read_ = 0;
  has_ended_ = false;
}

void Forward::advance(const Profile& profile, const RankChecker& checker, double now_ns) {
  if (has_ended_) {
    return;
  }
  if (mode_ == Mode::kHook) {
    if (checker.all_finished()) {
      run_through(profile, now_ns);
    }
    return;
  }
  const auto tensor_count = static_cast<int32_t>(profile.tensors.size());
  // A tensor that arrived before one that is read earlier made nobody wait: the clock is past its arrival then.
  for (; next_read_ < tensor_count && checker.has_arrived(next_read_); ++next_read_) {
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

void Forward::run_through(const Profile& profile, double now_ns) {
  double work_ns = profile.forward_ns;
  for (const Tensor& tensor : profile.tensors) {
    work_ns += tensor.update_ns;
  }
  clock_ns_ = std::max(clock_ns_, now_ns) + factor_ * work_ns;
  has_ended_ = true;
}

}  // namespace gradcast::sim
