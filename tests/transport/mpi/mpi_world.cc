// The transport over MPI for Python: with it the ranks of `mpirun` pass the cases that every transport passes.
//
// Thread safety: the thread that imported it.
#include <mpi.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <utility>
#include <vector>

#include "gradcast/mpi.h"
#include "tests/bindings/host_transport.h"

namespace py = pybind11;

namespace gradcast {
namespace {

int init(int level) {
  int provided = MPI_THREAD_SINGLE;
  MPI_Init_thread(nullptr, nullptr, level, &provided);
  return provided;
}

std::pair<int, int> place() {
  int rank = 0;
  int world_size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world_size);
  return {rank, world_size};
}

}  // namespace
}  // namespace gradcast

PYBIND11_MODULE(_mpi_world, module) {
  using gradcast::HostTransport;
  module.attr("MULTIPLE") = static_cast<int>(MPI_THREAD_MULTIPLE);
  module.attr("SERIALIZED") = static_cast<int>(MPI_THREAD_SERIALIZED);
  module.def("init", &gradcast::init);
  module.def("place", &gradcast::place);
  module.def(
      "barrier", [] { MPI_Barrier(MPI_COMM_WORLD); }, py::call_guard<py::gil_scoped_release>());
  module.def("finalize", [] { MPI_Finalize(); });
  module.def("abort", [](int code) { MPI_Abort(MPI_COMM_WORLD, code); });
  py::class_<HostTransport>(module, "Transport", py::module_local())
      .def(py::init([](const std::vector<py::buffer>& arrays) {
        return std::make_unique<HostTransport>(arrays, [](std::vector<gradcast::HostBuffer> buffers) {
          return gradcast::make_mpi_transport(MPI_COMM_WORLD, std::move(buffers));
        });
      }))
      .def_property_readonly("capsule", &HostTransport::capsule);
}
