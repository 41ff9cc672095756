// The entry of the module `_core`, and how C++ errors arrive in Python.
#include <string>

#include "bindings/bindings.h"
#include "gradcast/error.h"
#include "gradcast/version.h"

namespace py = pybind11;

namespace {

// gradcast::Error becomes gradcast.Error, which Python code raises too: one class to catch, with the code as a word. For
// wrong use, its constructor makes a gradcast.UsageError.
void raise_in_python(const gradcast::Error& error) {
  const py::object error_class = py::module_::import("gradcast.errors").attr("Error");
  const py::object exception = error_class(error.what(), std::string(to_string(error.code())));
  PyErr_SetObject(py::type::of(exception).ptr(), exception.ptr());
}

}  // namespace

PYBIND11_MODULE(_core, module) {
  module.doc() =
      "The core of gradcast: profiles, links, networks, plans, play, bounds, policies, the monitor, and the "
      "engine that follows plans. Described in _core.pyi.";
  module.attr("__version__") = GRADCAST_VERSION;
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const gradcast::Error& error) {
      raise_in_python(error);
    }
  });
  gradcast::bind_link(module);
  gradcast::bind_profile(module);
  gradcast::bind_plan(module);
  gradcast::bind_engine(module);
  gradcast::bind_monitor(module);
}
