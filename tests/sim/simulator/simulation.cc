// One run: takes events in order of time, passes them to ranks and network, and checks what they do.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gradcast/error.h"
#include "tests/sim/simulator/byte_coverage.h"
#include "tests/sim/simulator/draws.h"
#include "tests/sim/simulator/event_queue.h"
#include "tests/sim/simulator/network.h"
#include "tests/sim/simulator/plan_schedule.h"
#include "tests/sim/simulator/rank.h"
#include "tests/sim/simulator/simulate.h"

namespace gradcast {
namespace sim {
namespace {

// "same_operation" and so on.
std::string to_string(SimRule rule) {
  constexpr const char* kNames[] = {"same_operation", "every_byte", "ends", "follower"};
  return kNames[static_cast<size_t>(rule)];
}

std::string block_text(const FollowedPlan& plan, int32_t block) {
  return "block " + std::to_string(block + 1) + " of " + std::to_string(plan.block_count());
}

class Simulation {
 public:
  // The scenario must outlive this.
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

Simulation::Simulation(const SimScenario& scenario)
    : scenario_(scenario),
      schedule_(scenario),
      draws_(scenario.seed),
      network_(scenario, schedule_),
      coverage_(scenario.profile),
      ranks_(static_cast<size_t>(scenario.rank_count)),
      ended_counts_(static_cast<size_t>(scenario.iteration_count), 0) {
  result_.ranks.resize(ranks_.size());
}

SimResult Simulation::run() {
  for (const SimFault& fault : scenario_.faults) {
    if (fault.kind == SimFault::Kind::kLeave) {
      queue_.push({fault.time_ns, 0, 0, fault.rank, Event::Kind::kLeave});
    }
  }
  for (int32_t rank = 0; rank < scenario_.rank_count; ++rank) {
    queue_.push({0, 0, 0, rank, Event::Kind::kBegin});
  }
  const int64_t event_count_limit = event_count_max();
  while (!queue_.empty() && !result_.finding) {
    const Event event = queue_.pop();
    result_.end_ns = event.time_ns;
    if (++result_.event_count > event_count_limit) {
      find(SimRule::kEnds, event.rank, -1, "the run goes on after everything that could happen has happened");
      break;
    }
    try {
      handle(event);
    } catch (const Error& error) {
      find(SimRule::kFollower, event.rank, -1, error.what());
    }
  }
  conclude();
  return std::move(result_);
}

void Simulation::handle(const Event& event) {
  if (event.kind == Event::Kind::kComplete) {
    on_complete(event.rank, event.subject, event.time_ns);
  } else if (event.kind == Event::Kind::kLeave) {
    leave(event.rank, event.time_ns);
  } else if (ranks_[event.rank].has_left) {
    return;
  } else if (event.kind == Event::Kind::kBegin) {
    begin_iteration(event.rank, event.time_ns);
  } else {
    on_ready(event.rank, static_cast<int32_t>(event.subject), event.time_ns);
  }
}

// As the engine does in begin(): the follower starts over, and operations go on counting.
void Simulation::begin_iteration(int32_t index, double now_ns) {
  Rank& rank = ranks_[index];
  rank.first_operation += rank.launched_count;
  rank.launched_count = rank.finished_count = 0;
  ++rank.iteration;
  rank.plan = schedule_.in_force(index, rank.iteration);
  const auto& followed = schedule_.all()[rank.plan].followed;
  rank.follower.begin(followed);
  rank.backward.begin(scenario_, draws_, index, rank.iteration, now_ns);
  rank.forward.begin(followed->plan.mode, rank.backward.end_ns(), rank.backward.factor());
  push_next_gradient(index);
}

// Only the next gradient of a rank is in the queue, which would otherwise hold ranks times tensors.
void Simulation::push_next_gradient(int32_t index) {
  if (const auto gradient = ranks_[index].backward.next()) {
    queue_.push({gradient->time_ns, 0, gradient->tensor, index, Event::Kind::kReady});
  }
}

void Simulation::on_ready(int32_t index, int32_t tensor, double now_ns) {
  Rank& rank = ranks_[index];
  push_next_gradient(index);
  rank.follower.on_ready(tensor);
  launch_all(index, now_ns);
}

void Simulation::on_complete(int32_t index, int64_t operation, double now_ns) {
  Rank& rank = ranks_[index];
  const bool has_failed = network_.is_open(operation) && network_.at(operation).failed_by_rank >= 0;
  network_.tell(operation);
  if (rank.has_left || has_failed) {
    return;
  }
  const int64_t block = operation - rank.first_operation;
  rank.follower.on_finish(static_cast<int32_t>(block));
  ++rank.finished_count;
  const SimPlan& plan = schedule_.all()[rank.plan];
  if (plan.followed->plan.blocks[block].op != Op::kAllGather) {
    result_.ranks[index].reduced_bytes += plan.size_bytes[block];
  }
  launch_all(index, now_ns);
  rank.forward.advance(scenario_.profile, rank.follower, rank.all_finished(), now_ns);
  if (rank.forward.has_ended() && rank.all_finished()) {
    end_iteration(index);
  }
}

// As the engine does after each event.
void Simulation::launch_all(int32_t index, double now_ns) {
  while (!result_.finding) {
    const std::optional<int32_t> block = ranks_[index].follower.next();
    if (!block) {
      return;
    }
    launch(index, *block, now_ns);
  }
}

// Compares the operation with what other ranks have launched under the same number: equal numbers must carry equal
// bytes.
void Simulation::launch(int32_t index, int32_t block, double now_ns) {
  Rank& rank = ranks_[index];
  const int64_t number = rank.first_operation + rank.launched_count++;
  SimRankResult& seen = result_.ranks[index];
  const uint64_t content = schedule_.all()[rank.plan].contents[block];
  seen.order_hash = mixed(mixed(seen.order_hash + static_cast<uint64_t>(rank.iteration)) + content);
  ++seen.launch_count;
  if (scenario_.keep_launches) {
    seen.launches.push_back({rank.iteration, block});
  }
  Operation& operation = network_.launch(number, index, rank.iteration, rank.plan, block);
  if (!network_.is_same(operation, rank.iteration, rank.plan, block)) {
    const FollowedPlan& other = *schedule_.all()[operation.plan].followed;
    find(SimRule::kSameOperation, index, block,
         "operation " + std::to_string(number) + " is " + block_text(other, operation.block) + " of iteration " +
             std::to_string(operation.iteration) + " on rank " + std::to_string(operation.first_rank));
    result_.finding->other_rank = operation.first_rank;
  } else if (network_.is_complete(operation)) {
    start(operation, number, now_ns);
  }
}

// All ranks have launched it. It takes the wire, and its bytes count for the iteration.
void Simulation::start(Operation& operation, int64_t index, double now_ns) {
  using enum Draws::For;
  const Draws::Place place{-1, operation.iteration, operation.block};
  const double share = scenario_.jitter.link_share;
  network_.start(operation, now_ns, 1 + share * draws_.share(kAlpha, place), 1 + share * draws_.share(kBytes, place));
  const FollowedPlan& plan = *schedule_.all()[operation.plan].followed;
  coverage_.add(plan.plan.blocks[operation.block]);
  if (operation.block + 1 == plan.block_count()) {
    if (const auto fault = coverage_.finish()) {
      find(SimRule::kEveryByte, -1, -1, "in iteration " + std::to_string(operation.iteration) + ", " + *fault);
      result_.finding->iteration = operation.iteration;
      return;
    }
  }
  tell_ranks(operation, index);
}

// Each rank hears of the end at a time of its own.
void Simulation::tell_ranks(Operation& operation, int64_t index) {
  using enum Draws::For;
  const SimJitter& jitter = scenario_.jitter;
  for (int32_t rank = 0; rank < scenario_.rank_count; ++rank) {
    const Draws::Place place{rank, operation.iteration, operation.block};
    double delay_ns = jitter.completion_ns_max * draws_.share(kCompletion, place);
    if (draws_.share(kCompletionIsLate, place) < jitter.late_probability) {
      delay_ns += jitter.late_ns_max * draws_.share(kCompletionLate, place);
    }
    const Event event{operation.end_ns + delay_ns, 0, index, rank, Event::Kind::kComplete};
    if (is_hit(SimFault::Kind::kLoseCompletion, rank, operation.iteration, operation.block)) {
      continue;
    }
    queue_.push(event);
  }
}

void Simulation::end_iteration(int32_t index) {
  Rank& rank = ranks_[index];
  const double end_ns = rank.forward.end_ns();
  result_.ranks[index].finish_ns = end_ns;
  std::vector<double>& ends_ns = result_.iteration_end_ns;
  ends_ns.resize(std::max(ends_ns.size(), static_cast<size_t>(rank.iteration) + 1), 0);
  ends_ns[rank.iteration] = std::max(ends_ns[rank.iteration], end_ns);
  ++ended_counts_[rank.iteration];
  if (rank.iteration + 1 == scenario_.iteration_count) {
    rank.has_finished = true;
  } else {
    queue_.push({end_ns, 0, 0, index, Event::Kind::kBegin});
  }
}

// A rank that has left takes part in nothing; operations that have not ended by now fail.
void Simulation::leave(int32_t index, double now_ns) {
  Rank& rank = ranks_[index];
  if (rank.has_finished || rank.has_left) {
    return;
  }
  rank.has_left = true;
  network_.leave(index, now_ns);
}

bool Simulation::is_hit(SimFault::Kind kind, int32_t rank, int32_t iteration, int32_t subject) const {
  return std::ranges::any_of(scenario_.faults,
                             [&](const SimFault& fault) { return fault.hits(kind, rank, iteration, subject); });
}

// Keeps the first broken rule only: later ones follow from it.
void Simulation::find(SimRule rule, int32_t index, int32_t block, const std::string& what) {
  if (result_.finding) {
    return;
  }
  SimFinding finding;
  finding.rule = rule;
  finding.rank = index;
  if (index >= 0 && ranks_[index].iteration >= 0) {
    const FollowedPlan& plan = *schedule_.all()[ranks_[index].plan].followed;
    finding.iteration = ranks_[index].iteration;
    finding.text = "rank " + std::to_string(index) + ", iteration " + std::to_string(finding.iteration) + ": ";
    // A broken follower may name a block that the plan does not have.
    if (block >= 0 && block < plan.block_count()) {
      finding.block = block;
      finding.text += block_text(plan, block) + ": ";
    }
  }
  finding.text += what + " (" + to_string(rule) + ")";
  result_.finding = finding;
}

// Every iteration has one begin, one event for each gradient and one for each block on each rank; faults may add one
// each.
int64_t Simulation::event_count_max() const {
  const auto tensor_count = static_cast<int64_t>(scenario_.profile.tensors.size());
  size_t block_count_max = 0;
  for (const SimPlan& plan : schedule_.all()) {
    block_count_max = std::max(block_count_max, plan.contents.size());
  }
  const int64_t per_rank = (1 + tensor_count + static_cast<int64_t>(block_count_max)) * scenario_.iteration_count;
  return per_rank * scenario_.rank_count + static_cast<int64_t>(scenario_.faults.size());
}

// Iterations count as ended only if they ended on all ranks.
void Simulation::conclude() {
  while (!result_.iteration_end_ns.empty() &&
         ended_counts_[result_.iteration_end_ns.size() - 1] < scenario_.rank_count) {
    result_.iteration_end_ns.pop_back();
  }
  result_.operation_count = network_.started_count();
  result_.queue_peak = queue_.size_peak();
  for (size_t i = 0; i < ranks_.size(); ++i) {
    using enum SimRankResult::Outcome;
    const Rank& rank = ranks_[i];
    result_.ranks[i].outcome = rank.has_left       ? kLeft
                               : rank.has_finished ? kFinished
                               : result_.finding   ? kStopped
                                                   : kStoodStill;
  }
}

}  // namespace
}  // namespace sim

SimResult simulate(const SimScenario& scenario) {
  check_profile(scenario.profile);
  check_link(scenario.profile.link);
  GC_CHECK(scenario.rank_count >= 1 && scenario.iteration_count >= 1 && !scenario.plans.empty());
  return sim::Simulation(scenario).run();
}

}  // namespace gradcast
