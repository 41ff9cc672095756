// A parameter of a policy: its name for users, its range, and the field of the policy's options that it sets.
//
// The registry names each parameter once, here it learns its default from the options themselves and its kind from the
// field's type.
//
// Thread safety: pure; any thread.
#pragma once

#include <cmath>
#include <string>
#include <type_traits>

#include "gradcast/error.h"
#include "gradcast/types.h"
#include "model/number_text.h"

namespace gradcast {

// The largest value of a parameter that is a size.
inline constexpr auto kSizeMax = static_cast<double>(kBytesMax);

template <class Options>
struct Parameter {
  const char* name;
  double min;
  double max;
  const char* meaning;
  double default_value;
  bool whole;  // no fractions: the field is an integer or a switch
  void (*assign)(Options&, double);
};

template <auto kField>
struct Field;
template <class OptionsType, class ValueType, ValueType OptionsType::*kField>
struct Field<kField> {
  using Options = OptionsType;
  using Value = ValueType;
};

// The parameter that sets the field, e.g. &DdpOptions::cap_bytes.
template <auto kField>
Parameter<typename Field<kField>::Options> parameter(const char* name, double min, double max, const char* meaning) {
  using Options = typename Field<kField>::Options;
  using Value = typename Field<kField>::Value;
  const Options defaults;
  return {name,
          min,
          max,
          meaning,
          static_cast<double>(defaults.*kField),
          !std::is_same_v<Value, double>,
          [](Options& options, double value) { options.*kField = static_cast<Value>(value); }};
}

// Throws Error{kInvalidOption} for a value out of range, not a number, or with a fraction where the field has none.
template <class Options>
void check_value(const std::string& policy, const Parameter<Options>& parameter, double value) {
  if (value >= parameter.min && value <= parameter.max && !(parameter.whole && value != std::floor(value))) {
    return;
  }
  const std::string max = number_text(parameter.max);
  throw Error(ErrorCode::kInvalidOption, "parameter " + std::string(parameter.name) + " of policy " + policy + " is " +
                                             number_text(value) + "; it must be a " +
                                             (parameter.whole ? "whole " : "") + "number from " +
                                             number_text(parameter.min) + " to " + max);
}

}  // namespace gradcast
