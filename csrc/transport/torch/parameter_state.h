// A parameter and its gradient in the current step, and operations on many of them at once.
//
// Thread safety: any thread that holds the GIL. Hooks write atomic fields without it (gradient_table.h).
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "platform/sync.h"

namespace gradcast {

// See parameter_state.py.
enum class Phase : uint8_t { kIdle, kSent, kArrived, kUpdateDue };

// The views of all gradients: the list of gradient_buffers.py, which is the only thing of ours that refers to them. So
// reference counts show whether the program keeps one (owners.h).
using Views = std::shared_ptr<pybind11::list>;

// A gradient: none, the parameter's view, or a tensor of its own.
class GradientReference {
 public:
  GradientReference(Views views, size_t index) : views_(std::move(views)), index_(index) {}

  pybind11::object get() const;
  void set(const pybind11::object& tensor);
  // Without the GIL. REQUIRES: it is no tensor of its own.
  void set_to_view() { is_view_.store(true, std::memory_order_release); }
  bool is_view() const { return is_view_.load(std::memory_order_acquire); }
  bool is_own() const { return !own_.is_none(); }
  bool is(PyObject* tensor) const;

 private:
  Views views_;
  size_t index_;
  Atomic<bool> is_view_ = false;
  pybind11::object own_ = pybind11::none();
};

struct ParameterState {
  ParameterState(size_t at, std::string parameter_name, pybind11::object the_parameter, const Views& views);

  const size_t index;
  const std::string name;
  const pybind11::object parameter;
  Atomic<Phase> phase = Phase::kIdle;
  GradientReference visible_grad;  // the tensor that backward has put into .grad
  GradientReference update_grad;   // used by the update
  Atomic<int64_t> frozen_steps = 0;
  bool copy_due = false;
  bool updated_late = false;
  bool zero_after_update = false;
  pybind11::object locally_unused = pybind11::none();
  pybind11::object forward_version = pybind11::none();
  pybind11::tuple owned;

  const at::Tensor& tensor() const;
};

using SharedState = std::shared_ptr<ParameterState>;
// For Python a sequence of its own, which no call converts, since there are hundreds of parameters.
using States = std::vector<SharedState>;

template <typename Predicate>
States those(const States& states, Predicate predicate) {
  States found;
  std::copy_if(states.begin(), states.end(), std::back_inserter(found), predicate);
  return found;
}

// Changes the phase of each state, if it is one of `before`. Returns the first of which it is none, and leaves that and
// all behind it as they are; otherwise null.
SharedState enter(const States& states, Phase phase, const std::vector<Phase>& before);

// Their fields. `tensors_of`: the tensors that may be pending for them: parameters, what is owned for them, and, if
// asked for, visible gradients; with Nones.
std::vector<size_t> indices_of(const States& states);
pybind11::list parameters_of(const States& states);
pybind11::list updates_of(const States& states);
pybind11::list tensors_of(const States& states, bool gradients);

// Marks those that have been sent as arrived. Returns the tensors that are no longer pending, with Nones: while an
// update is pending, all of them stay so.
pybind11::list arrive(const States& states);

// Those whose updates are pending, whose gradients are to be zeroed after that, and that have an update_grad.
States due(const States& states);
States to_zero(const States& states);
States with_update(const States& states);
// Those that are unlike most when they have arrived: unused on this rank, or with a pending copy.
States unusual(const States& states);

// True if the .grad of each parameter is its visible gradient.
bool hold_visible(const States& states);

void bind_parameter_states(pybind11::module_& module);

}  // namespace gradcast

PYBIND11_MAKE_OPAQUE(gradcast::States)
