// One run: takes events in order of time, passes them to ranks and network, and checks what they do.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tests/sim/simulator/byte_coverage.h"
#include "tests/sim/simulator/draws.h"
#include "tests/sim/simulator/event_queue.h"
#include "tests/sim/simulator/network.h"
#include "tests/sim/simulator/plan_schedule.h"
#include "tests/sim/simulator/rank.h"
#include "tests/sim/simulator/simulate.h"

namespace gradcast::sim {

class Simulation {
 public:
  // REQUIRES: a checked scenario, which must outlive this.
  explicit Simulation(const SimScenario& scenario);

  // To the end, once.
  SimResult run();

 private:
  void handle(const Event& event);
  void begin_iteration(int32_t index, double now_ns);
  void push_next_gradient(int32_t index);
  void on_ready(int32_t index, int32_t tensor, double now_ns);
  void on_complete(int32_t index, int64_t operation, double now_ns);
  void launch_all(int32_t index, double now_ns);
  void launch(int32_t index, int32_t block, double now_ns);
  void start(Operation& operation, int64_t index, double now_ns);
  void tell_ranks(Operation& operation, int64_t index);
  void end_iteration(int32_t index);
  void leave(int32_t index, double now_ns);

  bool is_hit(SimFault::Kind kind, int32_t rank, int32_t iteration, int32_t subject) const;
  void find(SimRule rule, int32_t index, int32_t block, const std::string& what);
  int64_t event_count_max() const;
  void conclude();

  const SimScenario& scenario_;
  const PlanSchedule schedule_;
  const Draws draws_;
  EventQueue queue_;
  Network network_;
  ByteCoverage coverage_;
  std::vector<Rank> ranks_;
  std::vector<int32_t> ended_counts_;  // by iteration: ranks that have ended it
  SimResult result_;
};

}  // namespace gradcast::sim
