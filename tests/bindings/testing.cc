// The module `_testing`: what Python tests need of C++ and the package does not. Ranks as threads, a network for tests
// that need neither torch nor processes, and a transport driven by hand. Described in tests/_testing.pyi.
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bench/transport_driver.h"
#include "bindings/capsule.h"
#include "tests/bindings/host_transport.h"
#include "tests/support/scripted_world.h"

namespace py = pybind11;

namespace gradcast {
namespace {

// A driver and the Python object that its transport lives in.
class BoundDriver {
 public:
  explicit BoundDriver(py::object transport)
      : transport_(std::move(transport)), driver_(std::make_unique<TransportDriver>(transport_of(transport_))) {}

  ~BoundDriver() {
    const py::gil_scoped_release released;
    if (!driver_->close()) {
      // The transport may still complete what it holds back, into the driver.
      static_cast<void>(driver_.release());
    }
  }

  TransportDriver* operator->() { return driver_.get(); }

 private:
  py::object transport_;
  std::unique_ptr<TransportDriver> driver_;
};

void start(BoundDriver& driver, int64_t ticket, const std::vector<std::pair<int64_t, int64_t>>& pairs,
           const std::string& op, int32_t buffer) {
  std::vector<Range> ranges;
  for (const auto& [lo_bytes, hi_bytes] : pairs) {
    ranges.push_back({lo_bytes, hi_bytes});
  }
  driver->start(ticket, std::move(ranges), op_from_string(op), buffer);
}

std::unique_ptr<HostTransport> transport_of_rank(ScriptedWorld& world, int32_t rank,
                                                 const std::vector<py::buffer>& arrays) {
  const auto make = [&](std::vector<HostBuffer> buffers) { return world.transport(rank, std::move(buffers)); };
  return std::make_unique<HostTransport>(arrays, make);
}

void bind(py::module_& module) {
  using WithoutGil = py::call_guard<py::gil_scoped_release>;
  py::class_<HostTransport>(module, "InprocTransport", py::module_local())
      .def_property_readonly("capsule", &HostTransport::capsule);

  py::class_<ScriptedWorld>(module, "InprocWorld")
      .def(py::init<int32_t>(), py::arg("world_size"))
      .def_property_readonly("world_size", &ScriptedWorld::world_size)
      .def("transport", &transport_of_rank, py::arg("rank"), py::arg("buffers"))
      .def("delay", &ScriptedWorld::delay, py::arg("rank"), py::arg("operation_index"), py::arg("delay_ns"))
      .def("fail", &ScriptedWorld::fail, py::arg("rank"), py::arg("operation_index"), py::arg("message"));

  py::class_<BoundDriver>(module, "TransportDriver")
      .def(py::init<py::object>(), py::arg("transport"))
      .def_property_readonly("rank", [](BoundDriver& driver) { return driver->rank(); })
      .def_property_readonly("world_size", [](BoundDriver& driver) { return driver->world_size(); })
      .def("start", &start, py::arg("ticket"), py::arg("ranges"), py::kw_only(), py::arg("op") = "all_reduce",
           py::arg("buffer") = 0, WithoutGil())
      .def(
          "wait",
          [](BoundDriver& driver, int64_t ticket, int64_t timeout_ns) { return driver->wait(ticket, timeout_ns); },
          py::arg("ticket"), py::arg("timeout_ns"), WithoutGil())
      .def("completions", [](BoundDriver& driver) { return driver->completions(); })
      .def(
          "abort", [](BoundDriver& driver, const std::string& reason) { driver->abort(reason); }, py::arg("reason"),
          WithoutGil())
      .def(
          "close", [](BoundDriver& driver) { driver->close(); }, WithoutGil());
}

}  // namespace
}  // namespace gradcast

PYBIND11_MODULE(_testing, module) {
  // `_core` turns C++ errors into gradcast.Error, for every module of the process.
  py::module_::import("gradcast._core");
  gradcast::bind(module);
}
