// The monitor for Python.
#include <cstdint>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "gradcast/monitor.h"

namespace py = pybind11;

namespace gradcast {
namespace {

const char* name_of(Cause cause) {
  return cause == Cause::kCompute ? "compute" : "network";
}

}  // namespace

void bind_monitor(py::module_& module) {
  def_record<RankFacts>(module, "RankFacts", "step_ns", &RankFacts::step_ns, "busy_ns", &RankFacts::busy_ns, "link_ns",
                        &RankFacts::link_ns)
      .def(py::init([](double step_ns, double busy_ns, double link_ns) {
             return RankFacts{step_ns, busy_ns, link_ns};
           }),
           py::kw_only(), py::arg("step_ns"), py::arg("busy_ns"), py::arg("link_ns"));

  py::class_<Change> change(module, "Change");
  change.def_property_readonly("cause", [](const Change& self) { return name_of(self.cause); });
  def_fields(change, "rank", &Change::rank, "before_ns", &Change::before_ns, "after_ns", &Change::after_ns);
  def_repr(change, {"cause", "rank", "before_ns", "after_ns"});

  def_record<Decision>(module, "Decision", "on_baseline", &Decision::on_baseline, "stepped_aside",
                       &Decision::stepped_aside, "change", &Decision::change);
  def_record<Comparison>(module, "Comparison", "plan_ns", &Comparison::plan_ns, "baseline_ns", &Comparison::baseline_ns,
                         "baseline_count", &Comparison::baseline_count, "noise", &Comparison::noise);

  py::class_<Monitor>(module, "Monitor")
      .def(py::init([](int32_t rank_count, double busy_ns, double link_ns, bool has_baseline, bool begins_on_baseline,
                       int64_t hold_iterations) {
             return Monitor(rank_count, {busy_ns, link_ns, has_baseline, begins_on_baseline, hold_iterations});
           }),
           py::arg("rank_count"), py::kw_only(), py::arg("busy_ns") = 0.0, py::arg("link_ns") = 0.0,
           py::arg("has_baseline") = true, py::arg("begins_on_baseline") = false, py::arg("hold_iterations") = 0)
      .def(
          "on_iteration",
          [](Monitor& monitor, bool on_baseline, const std::vector<RankFacts>& ranks) {
            return monitor.on_iteration(on_baseline, ranks);
          },
          py::arg("on_baseline"), py::arg("ranks"))
      .def("comparison", &Monitor::comparison)
      .def_property_readonly("slowest_rank", &Monitor::slowest_rank);
}

}  // namespace gradcast
