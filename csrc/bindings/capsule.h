// Transports cross from one Python module to another in a capsule, whose name is the version of the interface.
//
// make_capsule() is all that a module needs that only makes transports, so it stands here, without a source file.
//
// Thread safety: any thread that holds the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include "gradcast/transport.h"

namespace gradcast {

// The transport inside a capsule, or inside the attribute `capsule` of an object. Borrowed: keep the object.
// Throws Error{kInvalidOption} for anything else.
Transport& transport_of(const pybind11::object& object);

// A capsule for a transport that `owner` keeps alive; the capsule keeps the owner.
inline pybind11::object make_capsule(Transport& transport, const pybind11::object& owner) {
  const auto release = [](PyObject* capsule) { Py_XDECREF(static_cast<PyObject*>(PyCapsule_GetContext(capsule))); };
  PyObject* capsule = PyCapsule_New(&transport, kTransportCapsule, release);
  if (capsule == nullptr || PyCapsule_SetContext(capsule, owner.inc_ref().ptr()) != 0) {
    throw pybind11::error_already_set();
  }
  return pybind11::reinterpret_steal<pybind11::object>(capsule);
}

}  // namespace gradcast
