// Lower bounds for Python.
#include <string>

#include "bindings/bindings.h"
#include "gradcast/bound.h"

namespace py = pybind11;

namespace gradcast {
namespace {

Bound bound_of(const Profile& profile, const LinkModel& link, const std::string& mode, int32_t in_flight, bool any_op) {
  return bound(profile, link, {mode_from_string(mode), in_flight, any_op});
}

}  // namespace

void bind_bound(py::module_& module) {
  py::class_<Bound> bound_class(module, "Bound");
  bound_class.def_readonly("plain_ns", &Bound::plain_ns)
      .def_readonly("best_ns", &Bound::best_ns)
      .def_readonly("exact", &Bound::exact);
  def_repr(bound_class, {"plain_ns", "best_ns", "exact"});

  module.def(
      "bound", &bound_of, py::arg("profile"), py::arg("link"), py::kw_only(), py::arg("mode") = "overlap",
      py::arg("in_flight") = 1, py::arg("any_op") = false, ReleaseGil(),
      "Iteration times (ns) that no plan of this mode and in_flight can beat. any_op: over plans with every kind of\n"
      "operation that the link has, instead of plans of all-reduces alone.");
}

}  // namespace gradcast
