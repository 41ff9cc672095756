// How a policy enters the registry: its description, its function, and its parameters.
//
// Thread safety: pure; any thread.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "cost/problem.h"
#include "gradcast/policy.h"
#include "policies/parameter.h"

namespace gradcast {

using ParameterValues = std::map<std::string, double>;
using Planner = std::function<std::vector<Block>(const Problem&)>;

struct PolicyDescription {
  const char* name;
  const char* summary;
  const char* source;
  bool scatter_gather = false;  // halves of all-reduces, one of them under forward: overlap mode only
};

struct PolicyEntry {
  PolicyInfo info;
  // The policy with the given parameters. Throws Error{kInvalidOption}.
  std::function<Planner(const ParameterValues&)> bind;
};

// "a, b, c".
std::string joined_names(const std::vector<std::string>& names);
// Throws Error{kInvalidOption} that lists the parameters the policy does have.
[[noreturn]] void refuse_parameter(const PolicyInfo& info, const std::string& name);

// An entry for `policy`, whose options struct gives the defaults of its parameters.
template <class Options>
PolicyEntry policy_entry(const PolicyDescription& description,
                         std::vector<Block> (*policy)(const Problem&, const Options&),
                         std::vector<Parameter<Options>> parameters = {}) {
  PolicyInfo info;
  info.name = description.name;
  info.summary = description.summary;
  info.source = description.source;
  info.overlap_only = info.needs_scatter_gather = description.scatter_gather;
  for (const Parameter<Options>& parameter : parameters) {
    info.parameters.push_back({parameter.name, parameter.default_value, parameter.meaning});
  }
  auto bind = [info, policy, parameters](const ParameterValues& values) -> Planner {
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

}  // namespace gradcast
