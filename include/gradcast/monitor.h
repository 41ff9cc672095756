// Change detection: does the plan in force still fit, and is it worth anything?
//
// The monitor is given the times of each iteration on each rank. It reports when the network or the compute has changed
// for good, so that measuring and planning again pays. From time to time it lets a few iterations follow the
// baseline, and it reports when that is as fast.
//
// Its decisions depend on nothing but these times, so ranks that feed it the same times decide the same, without a
// message.
//
// Thread safety: pure; any thread, one at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>

namespace gradcast {

// The times of one iteration on one rank, from the start of a backward pass to the start of the next, in ns.
struct RankFacts {
  double step_ns = 0;
  double busy_ns = 0;  // compute: the step without waiting for gradients
  double link_ns = 0;  // time during which at least one block was due and not finished
};

struct MonitorOptions {
  // The basis of the plan: the slowest rank's compute, and the time of its blocks on the network. 0: not known.
  double busy_ns = 0;
  double link_ns = 0;
  bool has_baseline = true;         // there is a baseline to compare with
  bool begins_on_baseline = false;  // it is the one in force
  int64_t hold_iterations = 0;      // no change is reported in the first so many iterations
};

enum class Cause { kCompute, kNetwork };

// A change that has lasted.
struct Change {
  Cause cause = Cause::kCompute;
  int32_t rank = -1;     // the one rank whose compute has changed; -1 for most ranks or the network
  double before_ns = 0;  // compute, or time on the network, per iteration
  double after_ns = 0;
};

struct Decision {
  bool on_baseline = false;                     // the next iteration follows the baseline
  bool stepped_aside = false;                   // the baseline is in force from now on; reported once
  std::optional<Change> change = std::nullopt;  // the plan no longer fits: measure and plan again
};

// The plan in force compared with the baseline. baseline_count is 0 before the first comparison.
struct Comparison {
  double plan_ns = 0;  // medians of iterations
  double baseline_ns = 0;
  int32_t baseline_count = 0;
  double noise = 0;  // of baseline_ns / plan_ns: two standard errors
};

class Monitor {
 public:
  // REQUIRES: rank_count >= 1.
  Monitor(int32_t rank_count, const MonitorOptions& options);
  ~Monitor();
  Monitor(Monitor&&) noexcept;

  // To be called with the times of each iteration, one entry per rank, in order. They may be some iterations late;
  // interrupted iterations are omitted. `on_baseline`: the iteration followed the baseline. Throws Error{kInvalidOption}
  // for another number of ranks.
  Decision on_iteration(bool on_baseline, std::span<const RankFacts> ranks);

  Comparison comparison() const;
  // The rank that has lately computed at least 10 % longer than the median rank (with two ranks, than the other); -1 if
  // none.
  int32_t slowest_rank() const;

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace gradcast
