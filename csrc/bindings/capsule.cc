#include "bindings/capsule.h"

#include <string>

#include "gradcast/error.h"

namespace py = pybind11;

namespace gradcast {
Transport& transport_of(const py::object& object) {
  const bool is_capsule = PyCapsule_CheckExact(object.ptr()) != 0;
  const py::object capsule = is_capsule ? object : py::getattr(object, "capsule", py::none());
  if (PyCapsule_IsValid(capsule.ptr(), kTransportCapsule) == 0) {
    throw Error(ErrorCode::kInvalidOption,
                "the transport is a " + std::string(py::str(py::type::of(object).attr("__name__"))) +
                    "; give a transport of this version of gradcast (its capsule is called " + kTransportCapsule + ")");
  }
  return *static_cast<Transport*>(PyCapsule_GetPointer(capsule.ptr(), kTransportCapsule));
}

}  // namespace gradcast
