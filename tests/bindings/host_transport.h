// A transport for Python that works on Python's arrays, and keeps them.
//
// Thread safety: any thread that holds the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "bindings/capsule.h"
#include "gradcast/error.h"
#include "gradcast/transport.h"

namespace gradcast {

// The memory of an array, which the caller keeps. Throws Error{kInvalidOption} unless it is contiguous and holds
// float32 or float64.
inline HostBuffer host_buffer_of(const pybind11::buffer_info& info) {
  const bool is_float = info.item_type_is_equivalent_to<float>();
  if (!is_float && !info.item_type_is_equivalent_to<double>()) {
    throw Error(ErrorCode::kInvalidOption,
                "a buffer holds elements of format '" + info.format + "'; this transport takes float32 and float64");
  }
  pybind11::ssize_t stride_bytes = info.itemsize;
  for (pybind11::ssize_t axis = info.ndim - 1; axis >= 0; --axis) {
    if (info.shape[axis] > 1 && info.strides[axis] != stride_bytes) {
      throw Error(ErrorCode::kInvalidOption, "a buffer is not contiguous; give flat arrays");
    }
    stride_bytes *= info.shape[axis];
  }
  return {info.ptr, info.size * info.itemsize, is_float ? Element::kFloat32 : Element::kFloat64};
}

class HostTransport {
 public:
  using Make = std::function<std::unique_ptr<Transport>(std::vector<HostBuffer>)>;

  // Throws what `make` throws; Error{kInvalidOption} for an array that host_buffer_of() refuses.
  HostTransport(const std::vector<pybind11::buffer>& arrays, const Make& make) {
    std::vector<HostBuffer> buffers;
    for (const pybind11::buffer& array : arrays) {
      views_.push_back(array.request(/*writable=*/true));
      buffers.push_back(host_buffer_of(views_.back()));
    }
    transport_ = make(std::move(buffers));
  }
  ~HostTransport() {
    const pybind11::gil_scoped_release released;
    transport_.reset();
  }

  // The attribute `capsule`, by which an engine or a driver takes the transport.
  static pybind11::object capsule(const pybind11::object& self) {
    return make_capsule(*self.cast<HostTransport&>().transport_, self);
  }

 private:
  std::vector<pybind11::buffer_info> views_;
  std::unique_ptr<Transport> transport_;
};

}  // namespace gradcast
