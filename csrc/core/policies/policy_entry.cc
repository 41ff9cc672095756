#include "policies/policy_entry.h"

#include "gradcast/error.h"

namespace gradcast {

std::string joined_names(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) {
    text += (text.empty() ? "" : ", ") + name;
  }
  return text;
}

void refuse_parameter(const PolicyInfo& info, const std::string& name) {
  std::vector<std::string> names;
  for (const PolicyParameter& parameter : info.parameters) {
    names.push_back(parameter.name);
  }
  throw Error(ErrorCode::kInvalidOption,
              "policy " + info.name + " has no parameter \"" + name + "\"; " +
                  (names.empty() ? "it has none at all, leave it out" : "it has " + joined_names(names)));
}

}  // namespace gradcast
