// Ranks as threads for Python: the transport of tests without torch.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/capsule.h"
#include "gradcast/inproc.h"

namespace py = pybind11;

namespace gradcast {
namespace {

// One rank's transport, and the Python arrays that it works on.
class BoundInproc {
 public:
  BoundInproc(InprocWorld& world, int32_t rank, const std::vector<py::buffer>& arrays) {
    std::vector<HostBuffer> buffers;
    for (const py::buffer& array : arrays) {
      views_.push_back(array.request(/*writable=*/true));
      buffers.push_back(host_buffer_of(views_.back()));
    }
    transport_ = world.transport(rank, std::move(buffers));
  }

  ~BoundInproc() {
    const py::gil_scoped_release released;
    transport_.reset();
  }

  Transport& transport() { return *transport_; }

 private:
  std::vector<py::buffer_info> views_;
  std::unique_ptr<Transport> transport_;
};

std::unique_ptr<InprocWorld> make_world(int32_t world_size, double alpha_ns, double beta_ns_per_byte) {
  return std::make_unique<InprocWorld>(world_size, InprocCost{alpha_ns, beta_ns_per_byte});
}

}  // namespace

void bind_inproc(py::module_& module) {
  py::class_<BoundInproc>(module, "InprocTransport").def_property_readonly("capsule", [](const py::object& self) {
    return make_capsule(self.cast<BoundInproc&>().transport(), self);
  });

  py::class_<InprocWorld>(module, "InprocWorld")
      .def(py::init(&make_world), py::arg("world_size"), py::kw_only(), py::arg("alpha_ns") = 0.0,
           py::arg("beta_ns_per_byte") = 0.0)
      .def_property_readonly("world_size", &InprocWorld::world_size)
      .def(
          "transport",
          [](InprocWorld& world, int32_t rank, const std::vector<py::buffer>& buffers) {
            return std::make_unique<BoundInproc>(world, rank, buffers);
          },
          py::arg("rank"), py::arg("buffers"))
      .def("delay", &InprocWorld::delay, py::arg("rank"), py::arg("operation_index"), py::arg("delay_ns"))
      .def("fail", &InprocWorld::fail, py::arg("rank"), py::arg("operation_index"), py::arg("message"));
}

}  // namespace gradcast
