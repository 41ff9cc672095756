// Transports cross from one Python module to another in a capsule: the name says which interface its pointer has.
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
pybind11::object make_capsule(Transport& transport, const pybind11::object& owner);

}  // namespace gradcast
