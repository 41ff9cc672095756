// What pending.py and others would do in Python tensor by tensor, for many tensors at once.
//
// Thread safety: any thread that holds the GIL; no call gives it back between two tensors.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace gradcast {

// What pending.py keeps. `base` is mixed into the class of a pending tensor; `owners` has its owner and its own class, by
// its id; `class_for(own class)` makes its pending class.
struct PendingMarks {
  pybind11::object base;
  pybind11::dict owners;
  pybind11::object class_for;

  // Makes tensors pending that are not. Returns how many.
  int64_t mark(const pybind11::list& tensors, const pybind11::object& owner) const;
  // Makes pending tensors ordinary again. None is allowed in the list.
  void clear(const pybind11::list& tensors) const;
  bool is_pending(PyObject* tensor) const;
};

// An attribute `grad` for `base`: that of torch, for which __torch_function__ is asked only if the set `asked_for` is not
// empty.
pybind11::object gradient_attribute(const pybind11::object& base, pybind11::set asked_for);

// Sets the .grad of these parameters, without torch's checks. Returns the former ones. REQUIRES: each has its
// parameter's shape, type and device, or is None.
pybind11::list swap_gradients(const pybind11::list& parameters, const pybind11::list& gradients);

// Whether the .grad of each parameter is this tensor.
bool hold_gradients(const pybind11::list& parameters, const pybind11::list& gradients);

// The types and devices of these tensors, for comparison.
pybind11::bytes kinds(const pybind11::list& tensors);

// Whether each of these tensors still begins at this address.
bool lie_at(const pybind11::list& tensors, const std::vector<int64_t>& addresses);

}  // namespace gradcast
