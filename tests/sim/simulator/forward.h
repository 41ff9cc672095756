// The forward pass of one rank: how far it has come, and when it ends. The rules are those of gradcast/play.h.
//
// Forward waits for nothing but tensors, so it is computed when they arrive and needs no events of its own.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>

#include "gradcast/profile.h"
#include "gradcast/types.h"
#include "tests/sim/simulator/rank_checker.h"

namespace gradcast::sim {

class Forward {
 public:
  // Backward ends at backward_end_ns; forward then takes its time multiplied by `factor`.
  void begin(Mode mode, double backward_end_ns, double factor);

  // Goes on as far as what has arrived allows. REQUIRES: called at once when something arrives, which is at now_ns.
  void advance(const Profile& profile, const RankChecker& checker, double now_ns);

  bool has_ended() const { return has_ended_; }
  // REQUIRES: has_ended().
  double end_ns() const { return clock_ns_; }

 private:
  void run_through(const Profile& profile, double now_ns);

  Mode mode_ = Mode::kOverlap;
  double factor_ = 1;
  double clock_ns_ = 0;
  double passed_need_ns_ = 0;
  int32_t next_read_ = 0;
  bool has_ended_ = false;
};

}  // namespace gradcast::sim
