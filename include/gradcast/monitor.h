// Whether the plan in force still holds. The monitor hears what each iteration took on each rank, and says when the network
// or the compute has changed for good, so that a new measurement pays, and when the plain plan, which is tried on a few
// iterations from time to time, is as fast, so that there is nothing to gain.
//
// Ranks that feed it the same facts come to the same decisions: nobody has to ask anybody.
//
// Thread safety: pure; any thread, one at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>

namespace gradcast {

// What one rank saw of one iteration, from the start of a backward pass to the start of the next.
struct RankFacts {
  double step_ns = 0;
  double busy_ns = 0;  // of it, not waiting for gradients
  double link_ns = 0;  // in which a block of its was due and not finished
};

struct MonitorOptions {
  // What the plan was made for: the slowest rank's compute, and the time that its blocks are on the network. 0: not known.
  double busy_ns = 0;
  double link_ns = 0;
  bool has_plain = true;        // there is a plain plan to compare with
  bool begins_plain = false;    // it is the one in force
  int64_t hold_iterations = 0;  // for so long nothing is measured again
};

enum class Cause { kCompute, kNetwork };

// A change that has persisted.
struct Change {
  Cause cause = Cause::kCompute;
  int32_t rank = -1;     // whose compute has changed; -1: most ranks', or the network
  double before_ns = 0;  // compute, or time on the network, per iteration
  double after_ns = 0;
};

struct Decision {
  bool plain = false;                           // the next iteration follows the plain plan
  bool stepped_aside = false;                   // from now on the plain plan is in force; said once
  std::optional<Change> change = std::nullopt;  // the plan no longer fits: measure and plan again
};

// What the plan in force is worth, as far as it was compared; the count is 0 before that.
struct Comparison {
  double plan_ns = 0;  // medians of iterations
  double plain_ns = 0;
  int32_t plain_count = 0;
  double noise = 0;  // of plain_ns / plan_ns: two standard errors
};

class Monitor {
 public:
  // REQUIRES: rank_count >= 1.
  Monitor(int32_t rank_count, const MonitorOptions& options);
  ~Monitor();
  Monitor(Monitor&&) noexcept;

  // After an iteration whose facts are known: one entry per rank. `plain`: it followed the plain plan. They may become known
  // some iterations late, but in order; of one that was interrupted there are none. Throws Error{kInvalidOption} for
  // another number of ranks.
  Decision on_iteration(bool plain, std::span<const RankFacts> ranks);

  Comparison comparison() const;
  // The rank that computes at least a tenth longer than the median rank (of two: the faster one) lately; -1: none.
  int32_t slowest_rank() const;

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace gradcast
