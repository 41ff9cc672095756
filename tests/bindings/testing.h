// The parts of the Python module `_testing`: what Python tests need of C++ and the package does not.
//
// Thread safety: any thread that holds the GIL.
#pragma once

#include <pybind11/pybind11.h>

namespace gradcast {

void bind_inproc(pybind11::module_& module);
void bind_driver(pybind11::module_& module);

}  // namespace gradcast
