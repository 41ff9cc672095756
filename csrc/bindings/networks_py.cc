// Derived and published networks for Python.
#include <string>

#include "bindings/bindings.h"
#include "gradcast/networks.h"

namespace py = pybind11;

namespace gradcast {

void bind_networks(py::module_& module) {
  py::class_<Hop> hop(module, "Hop");
  hop.def(py::init([](double latency_ns, double bandwidth_bytes_per_s) {
            return Hop{latency_ns, bandwidth_bytes_per_s};
          }),
          py::kw_only(), py::arg("latency_ns"), py::arg("bandwidth_bytes_per_s"))
      .def_readonly("latency_ns", &Hop::latency_ns)
      .def_readonly("bandwidth_bytes_per_s", &Hop::bandwidth_bytes_per_s);
  def_repr(hop, {"latency_ns", "bandwidth_bytes_per_s"});

  py::class_<NamedNetwork> named(module, "NamedNetwork");
  named.def_readonly("name", &NamedNetwork::name)
      .def_readonly("summary", &NamedNetwork::summary)
      .def_readonly("source", &NamedNetwork::source)
      .def_readonly("world_size", &NamedNetwork::world_size)
      .def_readonly("link", &NamedNetwork::link);
  def_repr(named, {"name", "summary", "world_size"});

  module.def("ring_link", &ring_link, py::arg("hop"), py::arg("worker_count"));
  module.def("tree_link", &tree_link, py::arg("hop"), py::arg("worker_count"));
  module.def(
      "hierarchical_link",
      [](const Hop& intra_node, const Hop& inter_node, int32_t node_count, int32_t workers_per_node) {
        return hierarchical_link({intra_node, inter_node, node_count, workers_per_node});
      },
      py::kw_only(), py::arg("intra_node"), py::arg("inter_node"), py::arg("node_count"), py::arg("workers_per_node"));
  module.def("networks", [] { return py::tuple(py::cast(networks())); });
  module.def(
      "network", [](const std::string& name) { return network(name); }, py::arg("name"));
}

}  // namespace gradcast
