// Python's arrays as the memory of transports.
//
// Thread safety: any thread that holds the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include "gradcast/host_buffer.h"

namespace gradcast {

// The memory of an array, which the caller keeps. Throws Error{kInvalidOption} unless it is contiguous and holds float32 or
// float64.
HostBuffer host_buffer_of(const pybind11::buffer_info& info);

}  // namespace gradcast
