#include "transport/torch/parameter_state.h"

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <utility>

namespace py = pybind11;

namespace gradcast {

namespace {

template <typename Field>
py::list list_of(const States& states, Field field) {
  py::list found(states.size());
  for (size_t i = 0; i < states.size(); ++i)
    PyList_SET_ITEM(found.ptr(), static_cast<Py_ssize_t>(i), py::object(field(*states[i])).release().ptr());
  return found;
}

}  // namespace

py::object GradientReference::get() const {
  return is_view() ? py::object((*views_)[index_]) : own_;
}

bool GradientReference::is(PyObject* tensor) const {
  return is_view() ? PyList_GET_ITEM(views_->ptr(), static_cast<Py_ssize_t>(index_)) == tensor : own_.ptr() == tensor;
}

void GradientReference::set(const py::object& tensor) {
  const bool is_the_view =
      index_ < views_->size() && PyList_GET_ITEM(views_->ptr(), static_cast<Py_ssize_t>(index_)) == tensor.ptr();
  is_view_.store(is_the_view, std::memory_order_release);
  py::object before = std::exchange(own_, is_the_view ? py::object(py::none()) : tensor);
}

ParameterState::ParameterState(size_t at, std::string parameter_name, py::object the_parameter, const Views& views)
    : index(at),
      name(std::move(parameter_name)),
      parameter(std::move(the_parameter)),
      visible_grad(views, at),
      update_grad(views, at) {
  if (!THPVariable_Check(parameter.ptr())) throw py::type_error("a parameter is expected");
}

const at::Tensor& ParameterState::tensor() const {
  return THPVariable_Unpack(parameter.ptr());
}

SharedState enter(const States& states, Phase phase, const std::vector<Phase>& before) {
  for (const SharedState& state : states) {
    if (std::find(before.begin(), before.end(), state->phase.load()) == before.end()) return state;
    state->phase = phase;
  }
  return nullptr;
}

std::vector<size_t> indices_of(const States& states) {
  std::vector<size_t> found;
  found.reserve(states.size());
  for (const SharedState& state : states)
    found.push_back(state->index);
  return found;
}

py::list parameters_of(const States& states) {
  return list_of(states, [](const ParameterState& state) { return state.parameter; });
}

py::list updates_of(const States& states) {
  return list_of(states, [](const ParameterState& state) { return state.update_grad.get(); });
}

py::list tensors_of(const States& states, bool gradients) {
  py::list found = parameters_of(states);
  for (const SharedState& state : states) {
    if (gradients) found.append(state->visible_grad.get());
    for (const py::handle each : state->owned)
      found.append(each);
  }
  return found;
}

py::list arrive(const States& states) {
  const States sent = those(states, [](const SharedState& state) { return state->phase == Phase::kSent; });
  for (const SharedState& state : sent)
    state->phase = Phase::kArrived;
  return tensors_of(sent, true);
}

States due(const States& states) {
  return those(states, [](const SharedState& state) { return state->phase == Phase::kUpdateDue; });
}

States to_zero(const States& states) {
  return those(states, [](const SharedState& state) { return state->zero_after_update; });
}

States with_update(const States& states) {
  return those(states, [](const SharedState& state) { return !state->update_grad.is(Py_None); });
}

States unusual(const States& states) {
  return those(states, [](const SharedState& state) { return state->copy_due || !state->locally_unused.is_none(); });
}

bool hold_visible(const States& states) {
  return std::all_of(states.begin(), states.end(), [](const SharedState& state) {
    const at::Tensor& gradient = state->tensor().grad();
    const py::object visible = state->visible_grad.get();
    return visible.is_none() ? !gradient.defined() : gradient.is_same(THPVariable_Unpack(visible.ptr()));
  });
}

void bind_parameter_states(py::module_& module) {
  py::enum_<Phase>(module, "Phase", "The phase of a parameter within a step: see parameter_state.py.")
      .value("IDLE", Phase::kIdle)
      .value("SENT", Phase::kSent)
      .value("ARRIVED", Phase::kArrived)
      .value("UPDATE_DUE", Phase::kUpdateDue);
  py::class_<ParameterState, SharedState>(module, "ParameterState", "See parameter_state.py.")
      .def_readonly("index", &ParameterState::index)
      .def_readonly("name", &ParameterState::name)
      .def_readonly("parameter", &ParameterState::parameter)
      .def_property_readonly("phase", [](const ParameterState& state) { return state.phase.load(); })
      .def_property_readonly("is_update_due",
                             [](const ParameterState& state) { return state.phase == Phase::kUpdateDue; })
      .def_property(
          "visible_grad", [](const ParameterState& state) { return state.visible_grad.get(); },
          [](ParameterState& state, const py::object& tensor) { state.visible_grad.set(tensor); })
      .def_property(
          "update_grad", [](const ParameterState& state) { return state.update_grad.get(); },
          [](ParameterState& state, const py::object& tensor) { state.update_grad.set(tensor); })
      .def_property(
          "frozen_steps", [](const ParameterState& state) { return state.frozen_steps.load(); },
          [](ParameterState& state, int64_t steps) { state.frozen_steps = steps; })
      .def_readwrite("copy_due", &ParameterState::copy_due)
      .def_readwrite("locally_unused", &ParameterState::locally_unused)
      .def_readwrite("updated_late", &ParameterState::updated_late)
      .def_readwrite("zero_after_update", &ParameterState::zero_after_update)
      .def_readwrite("forward_version", &ParameterState::forward_version)
      .def_readwrite("owned", &ParameterState::owned)
      .def("__repr__", [](const ParameterState& state) { return "<ParameterState " + state.name + ">"; });
  py::class_<States>(module, "States", "A sequence of ParameterState.")
      .def(py::init([](const py::list& given) {
             States states;
             for (const py::handle each : given)
               states.push_back(each.cast<SharedState>());
             return states;
           }),
           py::arg("states"))
      .def("__len__", &States::size)
      .def(
          "__getitem__", [](const States& states, size_t position) { return states.at(position); }, py::arg("position"))
      // Not make_iterator(), which ends by throwing: with torch's libraries that takes longer than what the loop does.
      .def("__iter__", [](const States& states) {
        py::list list;
        for (const SharedState& state : states)
          list.append(state);
        return py::iter(list);
      });
  py::implicitly_convertible<py::list, States>();
  module.def("enter", &enter, py::arg("states"), py::arg("phase"), py::arg("before"),
             "Changes the phase of each state. The first one of which it is none of `before`, where that ends.");
  module.def("indices_of", &indices_of, py::arg("states"));
  module.def("parameters_of", &parameters_of, py::arg("states"));
  module.def("updates_of", &updates_of, py::arg("states"), "The update_grad of each.");
  module.def("tensors_of", &tensors_of, py::arg("states"), py::arg("gradients"),
             "What may be pending for these states, perhaps without visible gradients. With Nones.");
  module.def("arrive", &arrive, py::arg("states"),
             "Those that have been sent have arrived. What is no longer pending, with Nones.");
  module.def("due", &due, py::arg("states"), "Those whose updates are due.");
  module.def("to_zero", &to_zero, py::arg("states"), "Those whose gradients are to be zeroed after the update.");
  module.def("with_update", &with_update, py::arg("states"), "Those with an update_grad.");
  module.def("unusual", &unusual, py::arg("states"),
             "Those that this rank has not used, or of which a copy is pending.");
  module.def("hold_visible", &hold_visible, py::arg("states"),
             "Whether the .grad of each parameter is its visible gradient.");
}

}  // namespace gradcast
