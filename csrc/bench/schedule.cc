#include "bench/schedule.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>

#include "gradcast/engine.h"
#include "gradcast/error.h"
#include "gradcast/policy.h"
#include "platform/clock.h"
#include "platform/thread.h"

namespace gradcast {
namespace {

constexpr int64_t kPatienceNs = 60'000'000'000;

double updates_ns(const Profile& profile) {
  return std::accumulate(profile.tensors.begin(), profile.tensors.end(), 0.0,
                         [](double sum, const Tensor& tensor) { return sum + tensor.update_ns; });
}

// One rank that trains under one plan after the other.
class Trainer {
 public:
  Trainer(Group& group, Network& network, const Profile& profile)
      : group_(group), profile_(profile), engine_(network, {}) {
    by_ready_.resize(profile.tensors.size());
    std::iota(by_ready_.rbegin(), by_ready_.rend(), 0);
    std::ranges::stable_sort(by_ready_, {}, [&](int32_t i) { return profile.tensors[i].ready_ns; });
  }

  void follow(const Plan& plan) {
    engine_.follow(profile_, plan);
    mode_ = plan.mode;
    policy_ = plan.policy;
  }

  // From the start of backward to the end of the next forward.
  double step_ns() {
    const int64_t begin_ns = steady_now_ns();
    engine_.begin();
    for (const int32_t tensor : by_ready_) {
      group_.compute_until(begin_ns + std::llround(profile_.tensors[tensor].ready_ns));
      engine_.on_ready(tensor);
    }
    double clock_ns = static_cast<double>(begin_ns) + profile_.backward_ns;
    group_.compute_until(std::llround(clock_ns));
    if (mode_ == Mode::kHook) {
      wait_for(by_ready_, clock_ns);
      clock_ns += profile_.forward_ns + updates_ns(profile_);
    } else {
      forward(clock_ns);
    }
    group_.compute_until(std::llround(clock_ns));
    return clock_ns - static_cast<double>(begin_ns);
  }

 private:
  void forward(double& clock_ns) {
    double need_ns = 0;
    for (size_t i = 0; i < profile_.tensors.size(); ++i) {
      const Tensor& tensor = profile_.tensors[i];
      clock_ns += tensor.need_ns - std::exchange(need_ns, tensor.need_ns);
      group_.compute_until(std::llround(clock_ns));
      const int32_t index = static_cast<int32_t>(i);
      wait_for({&index, 1}, clock_ns);
      clock_ns += tensor.update_ns;
    }
    clock_ns += profile_.forward_ns - need_ns;
  }

  // Compute stands still only where something is missing: that this thread wakes late is not the network's doing.
  void wait_for(std::span<const int32_t> tensors, double& clock_ns) {
    if (engine_.wait(tensors, 0)) {
      return;
    }
    if (!engine_.wait(tensors, kPatienceNs)) {
      throw Error(ErrorCode::kCommunication, "policy " + policy_ + ": after 60 s " + engine_.waiting_for());
    }
    clock_ns = std::max(clock_ns, static_cast<double>(steady_now_ns()));
  }

  Group& group_;
  const Profile& profile_;
  Engine engine_;
  Mode mode_ = Mode::kOverlap;
  std::string policy_;
  std::vector<int32_t> by_ready_;
};

std::vector<Plan> plans_of(const Profile& profile, const ScheduleOptions& options) {
  std::vector<Plan> plans;
  for (const PolicyInfo& policy : policies()) {
    if ((policy.overlap_only && options.mode == Mode::kHook) ||
        (policy.needs_scatter_gather && !profile.link.can_scatter_gather())) {
      continue;
    }
    plans.push_back(make_plan(profile, profile.link,
                              {.policy = policy.name, .mode = options.mode, .in_flight = options.in_flight}));
  }
  return plans;
}

// The times of the slowest rank in each step, because all ranks begin the next step together.
std::vector<double> steps_ns(Group& group, Trainer& trainer, int32_t step_count) {
  group.barrier();
  trainer.step_ns();
  std::vector<double> own_ns;
  for (int32_t step = 0; step < step_count; ++step) {
    own_ns.push_back(trainer.step_ns());
  }
  std::vector<double> slowest_ns = own_ns;
  for (const std::vector<double>& rank : group.gather(own_ns)) {
    std::ranges::transform(rank, slowest_ns, slowest_ns.begin(), [](double a, double b) { return std::max(a, b); });
  }
  return slowest_ns;
}

}  // namespace

std::vector<ScheduleRow> schedule(Group& group, Network& network, const Profile& profile,
                                  const ScheduleOptions& options, const std::function<void(int32_t round)>& tell) {
  wake_promptly();
  Trainer trainer(group, network, profile);
  const std::vector<Plan> plans = plans_of(profile, options);
  std::vector<std::vector<double>> times_ns(plans.size());
  for (int32_t round = 0; round < options.round_count; ++round) {
    tell(round + 1);
    for (size_t i = 0; i < plans.size(); ++i) {
      trainer.follow(plans[i]);
      const std::vector<double> found_ns = steps_ns(group, trainer, options.step_count);
      times_ns[i].insert(times_ns[i].end(), found_ns.begin(), found_ns.end());
    }
  }
  std::vector<ScheduleRow> rows;
  for (size_t i = 0; i < plans.size(); ++i) {
    const Plan& plan = plans[i];
    std::ranges::sort(times_ns[i]);
    rows.push_back({.policy = plan.policy,
                    .block_count = static_cast<int32_t>(plan.blocks.size()),
                    .step_ns = times_ns[i][times_ns[i].size() / 2],
                    .low_ns = times_ns[i].front(),
                    .high_ns = times_ns[i].back(),
                    .predicted_ns = plan.predicted_ns,
                    .bound_ns = plan.bound_ns,
                    .compute_ns = profile.backward_ns + profile.forward_ns + updates_ns(profile)});
  }
  return rows;
}

Profile scaled(const Profile& profile, double time_factor, double bytes_factor) {
  Profile result = profile;
  result.forward_ns *= time_factor;
  result.backward_ns *= time_factor;
  for (Tensor& tensor : result.tensors) {
    tensor.ready_ns *= time_factor;
    tensor.need_ns *= time_factor;
    tensor.update_ns *= time_factor;
    const auto element_count = static_cast<double>(tensor.bytes / tensor.element_bytes);
    tensor.bytes = tensor.element_bytes * std::max<int64_t>(1, std::llround(bytes_factor * element_count));
  }
  check_profile(result);
  return result;
}

}  // namespace gradcast
