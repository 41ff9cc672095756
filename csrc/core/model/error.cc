#include "gradcast/error.h"

namespace gradcast {

std::string_view to_string(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidProfile:
      return "invalid_profile";
    case ErrorCode::kInvalidPlan:
      return "invalid_plan";
    case ErrorCode::kInvalidLink:
      return "invalid_link";
    case ErrorCode::kInvalidOption:
      return "invalid_option";
    case ErrorCode::kInvalidUse:
      return "invalid_use";
    case ErrorCode::kCommunication:
      return "communication";
    case ErrorCode::kInternal:
      return "internal";
  }
  return "internal";
}

namespace detail {

void check_failed(const char* condition, const char* file, int line) {
  // The build's folder is nobody's business: the last part of the path names the source well enough.
  const std::string_view path = file;
  const std::string name(path.substr(path.find_last_of('/') + 1));
  throw Error(ErrorCode::kInternal, "a defect of gradcast, please report it: " + std::string(condition) +
                                        " does not hold at " + name + ":" + std::to_string(line));
}

}  // namespace detail
}  // namespace gradcast
