// The public face: refuses what makes no sense, then runs.
#include "tests/sim/simulator/simulate.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "gradcast/error.h"
#include "tests/sim/simulator/simulation.h"

namespace gradcast {
namespace {

// Numbers that nobody means; memory would run out first.
constexpr int32_t kRankCountMax = 1 << 20;
constexpr int32_t kIterationCountMax = 1 << 20;
constexpr double kFactorMax = 1e6;

void require(bool condition, const std::string& field, const std::string& rule,
             ErrorCode code = ErrorCode::kInvalidOption) {
  if (!condition) {
    throw Error(code, field + " " + rule);
  }
}

void check_jitter(const SimJitter& jitter) {
  const std::pair<const char*, double> limited[] = {{"compute_share", jitter.compute_share},
                                                    {"link_share", jitter.link_share}};
  for (const auto& [name, value] : limited) {
    require(value >= 0 && value <= kFactorMax, std::string("jitter.") + name, "must be 0 to 1e6");
  }
  require(jitter.straggler_factor_max >= 1 && jitter.straggler_factor_max <= kFactorMax, "jitter.straggler_factor_max",
          "must be 1 to 1e6");
  const std::pair<const char*, double> probabilities[] = {{"straggler_probability", jitter.straggler_probability},
                                                          {"late_probability", jitter.late_probability}};
  for (const auto& [name, value] : probabilities) {
    require(value >= 0 && value <= 1, std::string("jitter.") + name, "must be 0 to 1");
  }
  const std::pair<const char*, double> times[] = {{"ready_ns_max", jitter.ready_ns_max},
                                                  {"completion_ns_max", jitter.completion_ns_max},
                                                  {"late_ns_max", jitter.late_ns_max}};
  for (const auto& [name, value] : times) {
    require(value >= 0 && value <= kTimeMaxNs, std::string("jitter.") + name, "must be 0 to 2^53");
  }
}

// What a run needs to be possible at all; whether a plan carries every byte is what the run finds out.
void check_blocks(const SimScenario& scenario, size_t index) {
  int32_t buffer_count = 0;
  for (const Tensor& tensor : scenario.profile.tensors) {
    buffer_count = std::max(buffer_count, tensor.buffer + 1);
  }
  const Plan& plan = scenario.plans[index];
  const std::string field = "plans[" + std::to_string(index) + "]";
  require(!plan.blocks.empty(), field, "has no blocks", ErrorCode::kInvalidPlan);
  require(plan.in_flight >= 1, field + ".in_flight", "must be 1 or more", ErrorCode::kInvalidPlan);
  for (size_t k = 0; k < plan.blocks.size(); ++k) {
    const Block& block = plan.blocks[k];
    const std::string block_field = field + ".blocks[" + std::to_string(k) + "]";
    require(block.buffer >= 0 && block.buffer < buffer_count, block_field, "has a buffer that the profile has not",
            ErrorCode::kInvalidPlan);
    require(!block.ranges.empty() && block.ranges.front().lo_bytes >= 0 &&
                std::ranges::all_of(block.ranges, [](const Range& range) { return range.size_bytes() > 0; }),
            block_field, "has no bytes", ErrorCode::kInvalidPlan);
    const auto is_gathered =
        std::any_of(plan.blocks.begin() + static_cast<int64_t>(k), plan.blocks.end(), [&](const Block& other) {
          return other.op == Op::kAllGather && other.buffer == block.buffer && other.ranges == block.ranges;
        });
    require(block.op != Op::kReduceScatter || is_gathered, block_field, "is never gathered", ErrorCode::kInvalidPlan);
  }
}

void check_fault(const SimScenario& scenario, size_t index) {
  using enum SimFault::Kind;
  const SimFault& fault = scenario.faults[index];
  const std::string field = "faults[" + std::to_string(index) + "]";
  require(fault.rank >= 0 && fault.rank < scenario.rank_count, field + ".rank", "must be one of the ranks");
  const int32_t iteration_min = fault.kind == kKeepOldPlan ? 1 : 0;
  require(fault.iteration >= iteration_min && fault.iteration < scenario.iteration_count, field + ".iteration",
          "must be one of the iterations, and not the first where the plan of the one before is kept");
  const auto tensor_count = static_cast<int32_t>(scenario.profile.tensors.size());
  require(fault.subject >= 0 && (fault.kind != kLoseReady || fault.subject < tensor_count), field + ".subject",
          "must be a tensor or a block");
  require(fault.time_ns >= 0 && fault.time_ns <= kTimeMaxNs, field + ".time_ns", "must be 0 to 2^53");
}

void check_scenario(const SimScenario& scenario) {
  check_profile(scenario.profile);
  check_link(scenario.profile.link);
  check_jitter(scenario.jitter);
  require(scenario.rank_count >= 1 && scenario.rank_count <= kRankCountMax, "rank_count", "must be 1 to 2^20");
  require(scenario.iteration_count >= 1 && scenario.iteration_count <= kIterationCountMax, "iteration_count",
          "must be 1 to 2^20");
  require(!scenario.plans.empty(), "plans", "must hold at least one");
  for (size_t i = 0; i < scenario.plans.size(); ++i) {
    check_blocks(scenario, i);
  }
  int32_t iteration = 0;
  for (const SimPlanChange& change : scenario.changes) {
    require(change.iteration >= iteration, "changes", "must ascend by iteration");
    require(change.plan >= 0 && change.plan < static_cast<int32_t>(scenario.plans.size()), "changes",
            "must name one of the plans");
    iteration = change.iteration;
  }
  for (size_t i = 0; i < scenario.faults.size(); ++i) {
    check_fault(scenario, i);
  }
}

}  // namespace

std::string_view to_string(SimRule rule) {
  constexpr std::string_view kNames[] = {"same_operation", "plan_order", "start",      "ready", "in_flight",
                                         "one_end",        "arrival",    "every_byte", "ends",  "follower"};
  return kNames[static_cast<size_t>(rule)];
}

SimResult simulate(const SimScenario& scenario) {
  check_scenario(scenario);
  return sim::Simulation(scenario).run();
}

}  // namespace gradcast
