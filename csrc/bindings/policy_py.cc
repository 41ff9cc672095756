// Policies for Python.
#include <map>
#include <string>

#include "bindings/bindings.h"
#include "gradcast/policy.h"

namespace py = pybind11;

namespace gradcast {
namespace {

Plan plan_with(const Profile& profile, const LinkModel& link, std::string policy, const std::string& mode,
               int32_t in_flight, std::map<std::string, double> parameters) {
  return make_plan(profile, link, {std::move(policy), mode_from_string(mode), in_flight, std::move(parameters)});
}

}  // namespace

void bind_policy(py::module_& module) {
  py::class_<PolicyParameter> parameter(module, "PolicyParameter");
  parameter.def_readonly("name", &PolicyParameter::name)
      .def_readonly("default_value", &PolicyParameter::default_value)
      .def_readonly("meaning", &PolicyParameter::meaning);
  def_repr(parameter, {"name", "default_value", "meaning"});

  py::class_<PolicyInfo> info(module, "PolicyInfo");
  def_tuple(info, "parameters", &PolicyInfo::parameters);
  def_repr(info, {"name", "summary"});
  info.def_readonly("name", &PolicyInfo::name)
      .def_readonly("summary", &PolicyInfo::summary)
      .def_readonly("source", &PolicyInfo::source)
      .def_readonly("overlap_only", &PolicyInfo::overlap_only)
      .def_readonly("needs_scatter_gather", &PolicyInfo::needs_scatter_gather);

  module.attr("DEFAULT_POLICY") = std::string(kDefaultPolicy);
  module.def(
      "policies", [] { return py::tuple(py::cast(policies())); },
      "Every policy with its source and parameters, the default one first.");
  module.def(
      "make_plan", &plan_with, py::arg("profile"), py::arg("link"), py::kw_only(),
      py::arg("policy") = std::string(kDefaultPolicy), py::arg("mode") = "overlap", py::arg("in_flight") = 1,
      py::arg("parameters") = std::map<std::string, double>{}, ReleaseGil(),
      "Plans one iteration of the profile on the link. Returns a checked plan with its predicted time and bounds\n"
      "(ns from the start of backward to the end of the next forward).\n\n"
      "mode: \"overlap\" (gradients travel under the next forward too) or \"hook\" (all arrive before it).\n"
      "in_flight: blocks between launch and finish at the same time. parameters: of the policy, by name; see\n"
      "policies(). Raises gradcast.Error.");
}

}  // namespace gradcast
