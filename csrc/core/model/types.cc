// Words, numbers and errors as people read them.
#include "gradcast/types.h"

#include <cstdio>
#include <iterator>
#include <string>

#include "gradcast/error.h"

namespace gradcast {
namespace {

constexpr Mode kModes[] = {Mode::kOverlap, Mode::kHook};

// The one of `values` with this name. `what` and `known` are for the message.
template <typename Enum, size_t kCount>
Enum from_string(const Enum (&values)[kCount], std::string_view name, const char* what, const char* known) {
  for (const Enum value : values) {
    if (name == to_string(value)) return value;
  }
  throw Error(ErrorCode::kInvalidOption,
              std::string("the ") + what + " '" + std::string(name) + "' is unknown; use " + known);
}

}  // namespace

std::string_view to_string(Mode mode) {
  return mode == Mode::kOverlap ? "overlap" : "hook";
}

Op op_from_string(std::string_view name) {
  return from_string(kOps, name, "operation", "all_reduce, reduce_scatter or all_gather");
}

Mode mode_from_string(std::string_view name) {
  return from_string(kModes, name, "mode", "overlap or hook");
}

std::string_view to_string(ErrorCode code) {
  constexpr std::string_view kNames[] = {"invalid_profile", "invalid_plan",  "invalid_link", "invalid_option",
                                         "invalid_use",     "communication", "internal"};
  static_assert(std::size(kNames) == static_cast<size_t>(ErrorCode::kInternal) + 1);
  return kNames[static_cast<size_t>(code)];
}

void detail::check_failed(const char* condition, const char* file, int line) {
  // The last part of the path names the source; the build's folder would add nothing.
  const std::string_view path = file;
  const std::string name(path.substr(path.find_last_of('/') + 1));
  throw Error(ErrorCode::kInternal, "a defect of gradcast, please report it: " + std::string(condition) +
                                        " does not hold at " + name + ":" + std::to_string(line));
}

std::string bytes_text(int64_t size_bytes) {
  constexpr const char* kUnits[] = {"B", "kB", "MB", "GB", "TB", "PB"};
  auto value = static_cast<double>(size_bytes);
  size_t unit = 0;
  // 999.95 would be shown as 1000.0.
  while (value >= 999.95 && unit + 1 < std::size(kUnits)) {
    value /= 1000;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
  return text;
}

std::string number_text(double value) {
  if (value == kTimeMaxNs) {
    return "2^53";
  }
  char text[32];
  std::snprintf(text, sizeof text, "%.10g", value);
  return text;
}

}  // namespace gradcast
