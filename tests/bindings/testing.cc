// The entry of the module `_testing`. Described in tests/_testing.pyi.
#include "tests/bindings/testing.h"

namespace py = pybind11;

PYBIND11_MODULE(_testing, module) {
  // `_core` turns C++ errors into gradcast.Error, for every module of the process.
  py::module_::import("gradcast._core");
  gradcast::bind_inproc(module);
  gradcast::bind_driver(module);
}
