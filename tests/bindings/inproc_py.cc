// Ranks as threads for Python: a network for tests that need neither torch nor processes.
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/bindings/host_transport.h"
#include "tests/bindings/testing.h"
#include "tests/support/scripted_world.h"

namespace py = pybind11;

namespace gradcast {

void bind_inproc(py::module_& module) {
  py::class_<HostTransport>(module, "InprocTransport", py::module_local())
      .def_property_readonly("capsule", &HostTransport::capsule);

  py::class_<ScriptedWorld>(module, "InprocWorld")
      .def(py::init([](int32_t world_size, double alpha_ns, double beta_ns_per_byte) {
             return std::make_unique<ScriptedWorld>(world_size, InprocCost{alpha_ns, beta_ns_per_byte});
           }),
           py::arg("world_size"), py::kw_only(), py::arg("alpha_ns") = 0.0, py::arg("beta_ns_per_byte") = 0.0)
      .def_property_readonly("world_size", &ScriptedWorld::world_size)
      .def(
          "transport",
          [](ScriptedWorld& world, int32_t rank, const std::vector<py::buffer>& arrays) {
            return std::make_unique<HostTransport>(
                arrays, [&](std::vector<HostBuffer> buffers) { return world.transport(rank, std::move(buffers)); });
          },
          py::arg("rank"), py::arg("buffers"))
      .def("delay", &ScriptedWorld::delay, py::arg("rank"), py::arg("operation_index"), py::arg("delay_ns"))
      .def("fail", &ScriptedWorld::fail, py::arg("rank"), py::arg("operation_index"), py::arg("message"));
}

}  // namespace gradcast
