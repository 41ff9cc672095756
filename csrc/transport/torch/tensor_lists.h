// Operations on many tensors at once, which pending.py and others would otherwise do in Python tensor by tensor.
//
// Thread safety: any thread that holds the GIL; no call gives it back between two tensors.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace gradcast {

// Makes tensors pending that are not, whose class is then `class_for(own class)`, a subclass of `base`. Returns how many.
// None is allowed in the list.
int64_t mark_pending(const pybind11::object& base, const pybind11::list& tensors, const pybind11::object& class_for);

// Gives pending tensors their own class again, the `_gradcast_class` of the pending one. None is allowed in the list.
void clear_pending(const pybind11::object& base, const pybind11::list& tensors);

// An attribute `grad` for `base`: that of torch, for which __torch_function__ is asked only if the set `asked_for` is not
// empty.
pybind11::object gradient_attribute(const pybind11::object& base, pybind11::set asked_for);

// Sets the .grad of these parameters, without torch's checks. Returns the former ones. REQUIRES: each has its
// parameter's shape, type and device, or is None.
pybind11::list swap_gradients(const pybind11::list& parameters, const pybind11::list& gradients);

// True if the .grad of each parameter is this tensor.
bool hold_gradients(const pybind11::list& parameters, const pybind11::list& gradients);

// The types, devices and contents of these tensors, for comparison. Module.to() swaps the contents of DTensors, and with
// them the hooks.
pybind11::bytes kinds(const pybind11::list& tensors);

// True if each of these tensors still begins at this address; `addresses`: an array of type "Q".
bool lie_at(const pybind11::list& tensors, const pybind11::buffer& addresses);

// True if the values of these dicts, and the items of these lists, one container after the other, are `expected`.
bool contain(const pybind11::list& containers, const pybind11::list& expected);

}  // namespace gradcast
