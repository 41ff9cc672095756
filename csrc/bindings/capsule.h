// Objects cross from one Python module to another in capsules, whose name is the version of the interface.
//
// Thread safety: any thread that holds the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "gradcast/error.h"
#include "gradcast/transport.h"

namespace gradcast {

// The transport inside a capsule, or inside the attribute `capsule` of an object. Borrowed: keep the object.
// Throws Error{kInvalidOption} for anything else.
inline Transport& transport_of(const pybind11::object& object) {
  const bool is_capsule = PyCapsule_CheckExact(object.ptr()) != 0;
  const pybind11::object capsule = is_capsule ? object : pybind11::getattr(object, "capsule", pybind11::none());
  if (PyCapsule_IsValid(capsule.ptr(), kTransportCapsule) == 0) {
    throw Error(ErrorCode::kInvalidOption,
                "the transport is a " + std::string(pybind11::str(pybind11::type::of(object).attr("__name__"))) +
                    "; give a transport of this version of gradcast (its capsule is called " + kTransportCapsule + ")");
  }
  return *static_cast<Transport*>(PyCapsule_GetPointer(capsule.ptr(), kTransportCapsule));
}

// A capsule of this name for an object that `owner` keeps alive; the capsule keeps the owner.
inline pybind11::object make_capsule(void* object, const char* name, const pybind11::object& owner) {
  const auto release = [](PyObject* capsule) { Py_XDECREF(static_cast<PyObject*>(PyCapsule_GetContext(capsule))); };
  PyObject* capsule = PyCapsule_New(object, name, release);
  if (capsule == nullptr || PyCapsule_SetContext(capsule, owner.inc_ref().ptr()) != 0) {
    throw pybind11::error_already_set();
  }
  return pybind11::reinterpret_steal<pybind11::object>(capsule);
}

inline pybind11::object make_capsule(Transport& transport, const pybind11::object& owner) {
  return make_capsule(&transport, kTransportCapsule, owner);
}

}  // namespace gradcast
