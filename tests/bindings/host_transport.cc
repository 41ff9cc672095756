#include "tests/bindings/host_transport.h"

#include "gradcast/error.h"

namespace py = pybind11;

namespace gradcast {

HostBuffer host_buffer_of(const py::buffer_info& info) {
  const bool is_float = info.item_type_is_equivalent_to<float>();
  if (!is_float && !info.item_type_is_equivalent_to<double>()) {
    throw Error(ErrorCode::kInvalidOption,
                "a buffer holds elements of format '" + info.format + "'; this transport takes float32 and float64");
  }
  py::ssize_t stride_bytes = info.itemsize;
  for (py::ssize_t axis = info.ndim - 1; axis >= 0; --axis) {
    if (info.shape[axis] > 1 && info.strides[axis] != stride_bytes) {
      throw Error(ErrorCode::kInvalidOption, "a buffer is not contiguous; give flat arrays");
    }
    stride_bytes *= info.shape[axis];
  }
  return {info.ptr, info.size * info.itemsize, is_float ? Element::kFloat32 : Element::kFloat64};
}

}  // namespace gradcast
