// One field of many Python objects at once: loops over hundreds of parameters that run in each step.
//
// All objects of a list are of one class, and the field is one of its __slots__. Each function throws type_error where
// that is not so. Values are compared by identity.
//
// Thread safety: any thread that holds the GIL.
#pragma once

#include <pybind11/pybind11.h>

namespace gradcast {

// The field of each object.
pybind11::list fields(const pybind11::list& objects, const pybind11::str& name);

// The objects whose field is (or, with `is` false, is not) this value.
pybind11::list with_field(const pybind11::list& objects, const pybind11::str& name, const pybind11::object& value,
                          bool is);

// The objects whose field is not the item of `values` at their position. There may be more values than objects.
pybind11::list with_other_field(const pybind11::list& objects, const pybind11::str& name, const pybind11::list& values);

// Sets the field of each object to the item of `values` at its position. There may be more values than objects.
void set_fields(const pybind11::list& objects, const pybind11::str& name, const pybind11::list& values);

// Replaces the field of each object, if it is one of `before`, by `value`. Returns the first object of which it is none,
// and leaves that and all behind it as they are; otherwise None.
pybind11::object change_fields(const pybind11::list& objects, const pybind11::str& name, const pybind11::tuple& before,
                               const pybind11::object& value);

// Whether the values of these dicts, and the items of these lists, one container after the other, are `expected`.
bool contain(const pybind11::list& containers, const pybind11::list& expected);

}  // namespace gradcast
