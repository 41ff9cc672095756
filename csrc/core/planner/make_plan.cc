// The list of policies, and make_plan(): runs one of them, checks its plan, predicts its times and adds the bounds.
#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include "cost/problem.h"
#include "gradcast/error.h"
#include "gradcast/policy.h"
#include "planner/forecast.h"
#include "planner/window_chains.h"
#include "policies/policy_entry.h"

namespace gradcast {
namespace {

std::vector<PolicyEntry> all_policies() {
  std::vector<PolicyEntry> entries = {policy_entry(
      {.name = "forecast",
       .summary = "gradcast's own: splits and fuses in one plan; proven best for sequential models on a linear cost",
       .source = "docs/internals/planner.md"},
      &forecast,
      {parameter(&ForecastOptions::block_tolerance, "block_tolerance", 0, 1,
                 "share of the best iteration time to give up for fewer blocks"),
       parameter(&ForecastOptions::uncertainty, "uncertainty", 0, 0.99,
                 "share by which link costs may be off; the plan with the smallest worst ratio within it"),
       parameter(&ForecastOptions::effort, "effort", 0, 1000,
                 "length of the search where no exact plan is known; 1 is about 40 ms for 1,000 tensors"),
       parameter(&ForecastOptions::whole_tensors, "whole_tensors", 0, 1,
                 "1: only whole tensors in ready order, which stock DDP can follow; hook mode")})};
  std::ranges::move(published_policies(), std::back_inserter(entries));
  return entries;
}

const std::vector<PolicyEntry>& entries() {
  static const std::vector<PolicyEntry> kEntries = all_policies();
  return kEntries;
}

const PolicyEntry& find_entry(const std::string& policy) {
  for (const PolicyEntry& entry : entries()) {
    if (entry.info.name == policy) {
      return entry;
    }
  }
  throw Error(ErrorCode::kInvalidOption,
              "there is no policy \"" + policy + "\"; the policies are " + joined_names(policies()));
}

void check_fits(const PolicyInfo& info, const LinkModel& link, Mode mode) {
  if (info.overlap_only && mode != Mode::kOverlap) {
    throw Error(ErrorCode::kInvalidOption,
                "policy " + info.name + " works in overlap mode only, since half of its traffic runs under forward");
  }
  for (const Op op : {Op::kReduceScatter, Op::kAllGather}) {
    if (info.needs_scatter_gather && !link.of(op).available()) {
      throw Error(ErrorCode::kInvalidLink, "policy " + info.name + " needs link." + std::string(to_string(op)) +
                                               ", which is missing; add its cost");
    }
  }
}

void predict(Plan& plan, const Problem& problem) {
  const Timeline timeline = play(problem, plan.blocks);
  for (size_t k = 0; k < plan.blocks.size(); ++k) {
    plan.blocks[k].start_ns = timeline.blocks[k].launch_ns;
    plan.blocks[k].finish_ns = timeline.blocks[k].finish_ns;
  }
  plan.predicted_ns = timeline.iteration_ns;
}

bool uses_scatter_gather(const Plan& plan) {
  return std::any_of(plan.blocks.begin(), plan.blocks.end(),
                     [](const Block& block) { return block.op != Op::kAllReduce; });
}

}  // namespace

const std::vector<PolicyInfo>& policies() {
  static const std::vector<PolicyInfo> kPolicies = [] {
    std::vector<PolicyInfo> infos;
    for (const PolicyEntry& entry : entries()) {
      infos.push_back(entry.info);
    }
    return infos;
  }();
  return kPolicies;
}

Plan make_plan(const Profile& profile, const LinkModel& link, const PolicyOptions& options) {
  const PolicyEntry& entry = find_entry(options.policy);
  const auto planner = entry.bind(options.parameters);
  const Problem problem = make_problem(profile, link, options.mode, options.in_flight);
  check_fits(entry.info, link, options.mode);

  Plan plan{options.policy, options.mode, options.in_flight, planner(problem)};
  check_plan(plan, profile);
  predict(plan, problem);
  const Bound limit = bound(problem, uses_scatter_gather(plan));
  plan.bound_ns = limit.best_ns;
  plan.plain_bound_ns = limit.plain_ns;
  return plan;
}

}  // namespace gradcast
