#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "gradcast/error.h"
#include "gradcast/policy.h"
#include "policy/bytescheduler.h"
#include "policy/dcredit.h"
#include "policy/ddp.h"
#include "policy/dear.h"
#include "policy/fifo.h"
#include "policy/forecast.h"
#include "policy/mgwfbp.h"
#include "policy/p3.h"
#include "policy/parameter.h"
#include "policy/prophet.h"
#include "policy/usbyte.h"
#include "problem.h"

namespace gradcast {
namespace {

using Values = std::map<std::string, double>;
using Planner = std::function<std::vector<Block>(const Problem&)>;

struct Description {
  const char* name;
  const char* summary;
  const char* source;
  bool scatter_gather = false;  // halves of all-reduces, one of them under forward: overlap mode only
};

struct Entry {
  PolicyInfo info;
  // The policy with the given parameters. Throws Error{kInvalidOption}.
  std::function<Planner(const Values&)> bind;
};

std::string joined_names(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) {
    text += (text.empty() ? "" : ", ") + name;
  }
  return text;
}

[[noreturn]] void refuse_parameter(const PolicyInfo& info, const std::string& name) {
  std::vector<std::string> names;
  for (const PolicyParameter& parameter : info.parameters) {
    names.push_back(parameter.name);
  }
  throw Error(ErrorCode::kInvalidOption,
              "policy " + info.name + " has no parameter \"" + name + "\"; " +
                  (names.empty() ? "it has none at all, leave it out" : "it has " + joined_names(names)));
}

// One policy: what people read of it, its function, and its parameters, each of them named here and nowhere else.
template <class Options>
Entry entry(const Description& description, std::vector<Block> (*policy)(const Problem&, const Options&),
            std::vector<Parameter<Options>> parameters = {}) {
  PolicyInfo info;
  info.name = description.name;
  info.summary = description.summary;
  info.source = description.source;
  info.overlap_only = info.needs_scatter_gather = description.scatter_gather;
  for (const Parameter<Options>& parameter : parameters) {
    info.parameters.push_back({parameter.name, parameter.default_value, parameter.meaning});
  }
  auto bind = [info, policy, parameters](const Values& values) -> Planner {
    Options options;
    for (const auto& [name, value] : values) {
      const auto named = [&name = name](const Parameter<Options>& parameter) { return name == parameter.name; };
      const auto found = std::find_if(parameters.begin(), parameters.end(), named);
      if (found == parameters.end()) {
        refuse_parameter(info, name);
      }
      check_value(info.name, *found, value);
      found->assign(options, value);
    }
    return [policy, options](const Problem& problem) { return policy(problem, options); };
  };
  return {std::move(info), std::move(bind)};
}

std::vector<Entry> make_entries() {
  return {
      entry<ForecastOptions>(
          {.name = "forecast",
           .summary =
               "gradcast's own: splits and fuses in one plan; proven best for sequential models on a linear cost",
           .source = "docs/planner.md"},
          &forecast,
          {parameter<&ForecastOptions::block_tolerance>("block_tolerance", 0, 1,
                                                        "share of the best iteration time to give up for fewer blocks"),
           parameter<&ForecastOptions::uncertainty>(
               "uncertainty", 0, 0.99,
               "share by which link costs may be off; the plan with the smallest worst ratio within it"),
           parameter<&ForecastOptions::effort>(
               "effort", 0, 1000,
               "length of the search where no exact plan is known; 1 is about 40 ms for 1,000 tensors"),
           parameter<&ForecastOptions::whole_tensors>(
               "whole_tensors", 0, 1, "1: only whole tensors in ready order, which stock DDP can follow; hook mode")}),
      entry<FifoOptions>({.name = "fifo",
                          .summary = "one operation per tensor in the order of readiness (WFBP)",
                          .source = "Poseidon, USENIX ATC 2017"},
                         &fifo),
      entry<MgwfbpOptions>({.name = "mgwfbp",
                            .summary = "neighbours in ready order merged where the model says that it saves time",
                            .source = "MG-WFBP, INFOCOM 2019"},
                           &mgwfbp),
      entry<P3Options>(
          {.name = "p3", .summary = "small slices, the most urgent one first", .source = "P3, MLSys 2019"}, &p3,
          {parameter<&P3Options::slice_elements>("slice_elements", 1, kSizeMax, "largest slice of a tensor")}),
      entry<ByteschedulerOptions>(
          {.name = "bytescheduler",
           .summary = "chunks by priority, a credit of bytes handed to the link ahead; both sizes tuned",
           .source = "ByteScheduler, SOSP 2019"},
          &bytescheduler,
          {parameter<&ByteschedulerOptions::partition_bytes>("partition_bytes", 0, kSizeMax, "largest chunk; 0: tuned"),
           parameter<&ByteschedulerOptions::credit_bytes>("credit_bytes", 0, kSizeMax,
                                                          "bytes whose order is fixed ahead of the link; 0: tuned")}),
      entry<DdpOptions>(
          {.name = "ddp",
           .summary = "PyTorch DDP's buckets of whole tensors in the order of readiness",
           .source = "PyTorch Distributed, VLDB 2020"},
          &ddp,
          {parameter<&DdpOptions::first_bytes>("first_bytes", 1, kSizeMax, "size at which the first bucket closes"),
           parameter<&DdpOptions::cap_bytes>("cap_bytes", 1, kSizeMax, "size at which every other bucket closes")}),
      entry<ProphetOptions>(
          {.name = "prophet",
           .summary = "blocks sized to be gone before the next burst of gradients, most urgent bytes first",
           .source = "Prophet, ICPP 2021"},
          &prophet,
          {parameter<&ProphetOptions::partition_bytes>("partition_bytes", 1, kSizeMax, "largest partition of a tensor"),
           parameter<&ProphetOptions::credit_bytes>("credit_bytes", 0, kSizeMax,
                                                    "partitions that travel together after the last burst; 0: tuned"),
           parameter<&ProphetOptions::gap_factor>("gap_factor", 0, 1e6,
                                                  "a gap above this many mean gaps ends a burst")}),
      entry<DearOptions>(
          {.name = "dear",
           .summary = "reduce-scatter under backward, all-gather under forward, fused groups",
           .source = "DeAR, ICDCS 2023",
           .scatter_gather = true},
          &dear,
          {parameter<&DearOptions::fusion_bytes>("fusion_bytes", 0, kSizeMax, "largest group of tensors; 0: tuned")}),
      entry<UsbyteOptions>(
          {.name = "usbyte",
           .summary = "unequal blocks that fill the time until the next gradient, priorities adjusted by search",
           .source = "US-Byte, TPDS 2024"},
          &usbyte,
          {parameter<&UsbyteOptions::unit_bytes>("unit_bytes", 0, kSizeMax,
                                                 "smallest part of a tensor that is sent; 0: tuned"),
           parameter<&UsbyteOptions::search>("search", 0, 1, "0: priorities by urgency alone")}),
      entry<DcreditOptions>({.name = "dcredit",
                             .summary = "a credit for every gap between gradients, start-up cost included",
                             .source = "D-Credit, TNSE 2025"},
                            &dcredit,
                            {parameter<&DcreditOptions::unit_bytes>(
                                "unit_bytes", 0, kSizeMax, "smallest part of a tensor that is sent; 0: tuned")}),
  };
}

const std::vector<Entry>& entries() {
  static const std::vector<Entry> kEntries = make_entries();
  return kEntries;
}

const Entry& find_entry(const std::string& policy) {
  std::vector<std::string> names;
  for (const Entry& entry : entries()) {
    if (entry.info.name == policy) {
      return entry;
    }
    names.push_back(entry.info.name);
  }
  throw Error(ErrorCode::kInvalidOption,
              "there is no policy \"" + policy + "\"; the policies are " + joined_names(names));
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
    for (const Entry& entry : entries()) {
      infos.push_back(entry.info);
    }
    return infos;
  }();
  return kPolicies;
}

Plan make_plan(const Profile& profile, const LinkModel& link, const PolicyOptions& options) {
  const Entry& entry = find_entry(options.policy);
  const Planner planner = entry.bind(options.parameters);
  const Problem problem = make_problem(profile, link, options.mode, options.in_flight);
  check_fits(entry.info, link, options.mode);

  Plan plan;
  plan.policy = options.policy;
  plan.mode = options.mode;
  plan.in_flight = options.in_flight;
  plan.blocks = planner(problem);
  check_plan(plan, profile);
  predict(plan, problem);
  const Bound limit = bound(problem, uses_scatter_gather(plan));
  plan.bound_ns = limit.best_ns;
  plan.plain_bound_ns = limit.plain_ns;
  return plan;
}

}  // namespace gradcast
