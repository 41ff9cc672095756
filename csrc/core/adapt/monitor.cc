#include "gradcast/monitor.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <string>
#include <vector>

#include "gradcast/error.h"

namespace gradcast {
namespace {

// A change counts when so many iterations in a row show it.
constexpr size_t kPersistCount = 6;
// Those that show what is usual; before them, the first ones of a plan may hold a rest of the last one.
constexpr int64_t kSettleCount = 2;
constexpr size_t kUsualCount = 16;
// A deviation is one above all of these: of the usual value, of its scatter, of a step, which it would hardly change.
constexpr double kChangeShare = 0.10;
constexpr double kChangeScatters = 5;
constexpr double kStepShare = 0.02;
// The measurements for the plan and those of its first iterations come from different moments of the loop.
constexpr double kExpectationShare = 0.30;

// Baseline iterations are tried in fours: once when the usual values are known, then ever more rarely, at most four of
// four hundred, which costs less than 1 % where they take twice as long. Twelve must speak against the plan to give it
// up.
constexpr int32_t kTrialCount = 4;
constexpr size_t kTrialsToStay = 3;
constexpr int32_t kTrialsToGiveUp = 12;
constexpr int64_t kFirstTrial = kSettleCount + static_cast<int64_t>(kUsualCount);
constexpr int64_t kTrialInterval = 400;
constexpr int64_t kTrialIntervalMax = 3200;
constexpr int64_t kTrialIntervalInterrupted = 40;
constexpr size_t kPlanStepCount = 16;

constexpr double kSlowShare = 0.10;
constexpr double kScatterOfNormal = 1.4826;  // standard deviation over median absolute deviation
constexpr double kErrorOfMedian = 1.2533;    // standard error of a median over that of a mean

template <typename Values>
double median_of(const Values& values) {
  std::vector<double> sorted(values.begin(), values.end());
  std::sort(sorted.begin(), sorted.end());
  const size_t half = sorted.size() / 2;
  return sorted.size() % 2 == 1 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

template <typename Values>
double scatter_of(const Values& values) {
  const double middle = median_of(values);
  std::vector<double> distances;
  for (const double value : values) {
    distances.push_back(std::abs(value - middle));
  }
  return kScatterOfNormal * median_of(distances);
}

// One number per iteration: what is usual, and whether the last ones all differ from it, in the same direction.
class Signal {
 public:
  void add(double value) {
    if (usual_.size() < kUsualCount) {
      usual_.push_back(value);
      if (is_known()) {
        usual_median_ = median_of(usual_);
        usual_scatter_ = scatter_of(usual_);
      }
      return;
    }
    recent_.push_back(value);
    if (recent_.size() > kPersistCount) {
      recent_.pop_front();
    }
  }

  bool is_known() const { return usual_.size() == kUsualCount; }
  double before() const { return usual_median_; }
  double after() const { return recent_.empty() ? usual_median_ : median_of(recent_); }

  bool has_changed(double least) const {
    if (recent_.size() < kPersistCount) {
      return false;
    }
    const double threshold = std::max({least, kChangeShare * usual_median_, kChangeScatters * usual_scatter_});
    const auto above = [&](double value) { return value > usual_median_ + threshold; };
    const auto below = [&](double value) { return value < usual_median_ - threshold; };
    return std::all_of(recent_.begin(), recent_.end(), above) || std::all_of(recent_.begin(), recent_.end(), below);
  }

  // True if both the usual value and the last ones differ from the expected one.
  bool differs_from(double expected, double least) const {
    const double threshold = std::max(least, kExpectationShare * expected);
    const auto differs = [&](double value) { return std::abs(value - expected) > threshold; };
    return expected > 0 && recent_.size() == kPersistCount && differs(usual_median_) &&
           std::all_of(recent_.begin(), recent_.end(), differs);
  }

 private:
  std::vector<double> usual_;
  std::deque<double> recent_;
  double usual_median_ = 0;
  double usual_scatter_ = 0;
};

// The plan in force against the baseline, in trials of a few iterations.
class Trials {
 public:
  // After an iteration. Returns true when enough baseline ones were as fast to give the plan up.
  bool add(bool on_baseline, double step_ns) {
    ++iterations_;
    if (!on_baseline) {
      plan_ns_.push_back(step_ns);
      if (plan_ns_.size() > kPlanStepCount) {
        plan_ns_.pop_front();
      }
      return false;
    }
    baseline_ns_.push_back(step_ns);
    return has_come();
  }

  // Instead, after an iteration of which nothing is known.
  bool skip(bool on_baseline) { return on_baseline && has_come(); }

  // True if the next iteration is a baseline one. Call it once per iteration.
  bool next_is_baseline() {
    if (to_schedule_ == 0 && awaited_ == 0 && iterations_ >= next_trial_) {
      if (begins_anew_) {
        baseline_ns_.clear();
        begins_anew_ = false;
      }
      to_schedule_ = kTrialCount;
    }
    if (to_schedule_ == 0) {
      return false;
    }
    --to_schedule_;
    ++awaited_;
    return true;
  }

  Comparison comparison() const {
    if (baseline_ns_.empty() || plan_ns_.empty()) {
      return {};
    }
    Comparison result{median_of(plan_ns_), median_of(baseline_ns_), static_cast<int32_t>(baseline_ns_.size())};
    const auto relative_error = [](const auto& values, double median) {
      return kErrorOfMedian * scatter_of(values) / std::sqrt(static_cast<double>(values.size())) / median;
    };
    const double ratio = result.baseline_ns / result.plan_ns;
    result.noise =
        2 * ratio *
        std::hypot(relative_error(plan_ns_, result.plan_ns), relative_error(baseline_ns_, result.baseline_ns));
    return result;
  }

 private:
  // A baseline iteration. Once all of a trial have come, it is judged.
  bool has_come() {
    --awaited_;
    return to_schedule_ == 0 && awaited_ == 0 && judge();
  }

  bool judge() {
    const Comparison result = comparison();
    if (baseline_ns_.size() >= kTrialsToStay && result.baseline_ns / result.plan_ns > 1 + result.noise) {
      next_trial_ = iterations_ + interval_;
      interval_ = std::min(2 * interval_, kTrialIntervalMax);
      begins_anew_ = true;
      return false;
    }
    // In turns, so that what else the machine does falls on both; later where most are interrupted.
    next_trial_ = iterations_ + (baseline_ns_.size() < kTrialsToStay ? kTrialIntervalInterrupted : kTrialCount);
    return static_cast<int32_t>(baseline_ns_.size()) >= kTrialsToGiveUp;
  }

  int64_t iterations_ = 0;
  int64_t next_trial_ = kFirstTrial;
  int64_t interval_ = kTrialInterval;
  int32_t to_schedule_ = 0;
  int32_t awaited_ = 0;  // baseline iterations that were requested and not reported yet
  bool begins_anew_ = false;
  std::deque<double> plan_ns_;
  std::vector<double> baseline_ns_;
};

}  // namespace

class Monitor::State {
 public:
  State(int32_t rank_count, const MonitorOptions& options)
      : options_(options), on_baseline_(options.begins_on_baseline), busy_of_(rank_count) {
    GC_CHECK(rank_count >= 1);
  }

  Decision on_iteration(bool on_baseline, std::span<const RankFacts> ranks) {
    if (!ranks.empty() && ranks.size() != busy_of_.size()) {
      throw Error(ErrorCode::kInvalidOption, "the monitor of " + std::to_string(busy_of_.size()) +
                                                 " ranks was given facts of " + std::to_string(ranks.size()));
    }
    Decision decision;
    ++iterations_;
    if (iterations_ > kSettleCount) {
      decision.stepped_aside = compare(on_baseline, ranks);
      if (on_baseline == on_baseline_ && !decision.stepped_aside && !ranks.empty()) {
        watch(ranks);
        decision.change = change();
      }
    }
    decision.on_baseline = on_baseline_ || (options_.has_baseline && trials_.next_is_baseline());
    return decision;
  }

  Comparison comparison() const { return trials_.comparison(); }

  int32_t slowest_rank() const {
    if (!busy_.is_known()) {
      return -1;
    }
    std::vector<double> lately;
    for (const Signal& signal : busy_of_) {
      lately.push_back(signal.after());
    }
    const auto slowest = static_cast<int32_t>(std::max_element(lately.begin(), lately.end()) - lately.begin());
    std::vector<double> sorted = lately;
    std::sort(sorted.begin(), sorted.end());
    const double median_ns = sorted[(sorted.size() - 1) / 2];  // of some rank, and of two the faster one's
    return lately[slowest] > (1 + kSlowShare) * median_ns ? slowest : -1;
  }

 private:
  bool compare(bool on_baseline, std::span<const RankFacts> ranks) {
    if (on_baseline_ || !options_.has_baseline) {
      return false;
    }
    double sum_ns = 0;
    for (const RankFacts& rank : ranks) {
      sum_ns += rank.step_ns;
    }
    on_baseline_ = ranks.empty() ? trials_.skip(on_baseline)
                                 : trials_.add(on_baseline, sum_ns / static_cast<double>(ranks.size()));
    if (on_baseline_) {
      // Other operations now: what is usual has to be learned again, and what was expected no longer holds.
      busy_ = link_ = step_ = Signal();
      busy_of_.assign(busy_of_.size(), Signal());
      options_.busy_ns = options_.link_ns = 0;
    }
    return on_baseline_;
  }

  void watch(std::span<const RankFacts> ranks) {
    double busy_ns = 0;
    double link_ns = ranks[0].link_ns;
    double step_ns = 0;
    for (size_t r = 0; r < ranks.size(); ++r) {
      busy_of_[r].add(ranks[r].busy_ns);
      busy_ns = std::max(busy_ns, ranks[r].busy_ns);
      // The last rank to join does not wait for the others: its blocks take what the network takes.
      link_ns = std::min(link_ns, ranks[r].link_ns);
      step_ns = std::max(step_ns, ranks[r].step_ns);
    }
    busy_.add(busy_ns);
    link_.add(link_ns);
    step_.add(step_ns);
  }

  std::optional<Change> change() const {
    if (iterations_ <= options_.hold_iterations) {
      return std::nullopt;
    }
    const double least_ns = kStepShare * step_.after();
    if (busy_.has_changed(least_ns)) {
      return Change{Cause::kCompute, changed_rank(), busy_.before(), busy_.after()};
    }
    if (link_.has_changed(least_ns)) {
      return Change{Cause::kNetwork, -1, link_.before(), link_.after()};
    }
    if (busy_.differs_from(options_.busy_ns, least_ns)) {
      return Change{Cause::kCompute, -1, options_.busy_ns, busy_.after()};
    }
    if (link_.differs_from(options_.link_ns, least_ns)) {
      return Change{Cause::kNetwork, -1, options_.link_ns, link_.after()};
    }
    return std::nullopt;
  }

  // The one whose compute has changed most, unless that of most ranks has.
  int32_t changed_rank() const {
    const auto share = [&](size_t r) { return std::abs(busy_of_[r].after() / busy_of_[r].before() - 1); };
    size_t changed_count = 0;
    size_t most = 0;
    for (size_t r = 0; r < busy_of_.size(); ++r) {
      changed_count += share(r) > kChangeShare ? 1 : 0;
      most = share(r) > share(most) ? r : most;
    }
    return 2 * changed_count > busy_of_.size() ? -1 : static_cast<int32_t>(most);
  }

  MonitorOptions options_;
  bool on_baseline_;
  int64_t iterations_ = 0;
  Signal busy_;  // of the slowest rank
  Signal link_;
  Signal step_;
  std::vector<Signal> busy_of_;  // by rank
  Trials trials_;
};

Monitor::Monitor(int32_t rank_count, const MonitorOptions& options)
    : state_(std::make_unique<State>(rank_count, options)) {}
Monitor::~Monitor() = default;
Monitor::Monitor(Monitor&&) noexcept = default;

Decision Monitor::on_iteration(bool on_baseline, std::span<const RankFacts> ranks) {
  return state_->on_iteration(on_baseline, ranks);
}

Comparison Monitor::comparison() const {
  return state_->comparison();
}

int32_t Monitor::slowest_rank() const {
  return state_->slowest_rank();
}

}  // namespace gradcast
