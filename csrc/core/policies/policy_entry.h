// An entry of the registry of policies: description, function, and parameters, each with its name for users, its range,
// and the field of the policy's options that it sets. The options give the defaults, the field's type the kind.
//
// Thread safety: pure; any thread.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "cost/problem.h"
#include "gradcast/error.h"
#include "gradcast/policy.h"

namespace gradcast {

// The largest value of a parameter that is a size.
inline constexpr auto kSizeMax = static_cast<double>(kBytesMax);

template <class Options>
struct Parameter {
  PolicyParameter info;
  double min;
  double max;
  bool whole;  // no fractions: the field is an integer or a switch
  std::function<void(Options&, double)> assign;
};

// The parameter that sets `field`.
template <class Options, class Value>
Parameter<Options> parameter(Value Options::*field, const char* name, double min, double max, const char* meaning) {
  return {{name, static_cast<double>(Options{}.*field), meaning},
          min,
          max,
          !std::is_same_v<Value, double>,
          [field](Options& options, double value) { options.*field = static_cast<Value>(value); }};
}

struct PolicyEntry {
  PolicyInfo info;
  // The policy with the given parameters. Throws Error{kInvalidOption} that says which parameters and values there are.
  std::function<std::function<std::vector<Block>(const Problem&)>(const std::map<std::string, double>&)> bind;
};

// The published policies, in the order of their publication. gradcast's own is not among them: planner/make_plan.cc adds
// it in front.
std::vector<PolicyEntry> published_policies();

// "a, b, c": the names of policies or parameters.
template <class Infos>
std::string joined_names(const Infos& infos) {
  std::string text;
  for (const auto& info : infos) {
    text += (text.empty() ? "" : ", ") + info.name;
  }
  return text;
}

// An entry for `policy`; `info` without its parameters.
template <class Options>
PolicyEntry policy_entry(PolicyInfo info, std::vector<Block> (*policy)(const Problem&, const Options&),
                         std::vector<Parameter<Options>> parameters = {}) {
  for (const Parameter<Options>& parameter : parameters) {
    info.parameters.push_back(parameter.info);
  }
  auto bind = [info, policy, parameters](const std::map<std::string, double>& values) {
    Options options;
    for (const auto& [name, value] : values) {
      const auto found = std::ranges::find(parameters, name, [](const auto& parameter) { return parameter.info.name; });
      if (found == parameters.end()) {
        throw Error(ErrorCode::kInvalidOption, "policy " + info.name + " has no parameter \"" + name + "\"; " +
                                                   (parameters.empty() ? "it has none at all, omit it"
                                                                       : "it has " + joined_names(info.parameters)));
      }
      if (!(value >= found->min && value <= found->max) || (found->whole && value != std::floor(value))) {
        throw Error(ErrorCode::kInvalidOption, "parameter " + name + " of policy " + info.name + " is " +
                                                   number_text(value) + "; it must be a " +
                                                   (found->whole ? "whole " : "") + "number from " +
                                                   number_text(found->min) + " to " + number_text(found->max));
      }
      found->assign(options, value);
    }
    return [policy, options](const Problem& problem) { return policy(problem, options); };
  };
  return {std::move(info), std::move(bind)};
}

}  // namespace gradcast
