#include "transport/torch/gradient_table.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mul.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "transport/torch/without_torch_function.h"

namespace py = pybind11;

namespace gradcast {

namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;
using torch::autograd::variable_list;
namespace impl = torch::autograd::impl;

constexpr int64_t kNoTask = -1;

class Hook final : public torch::autograd::FunctionPostHook {
 public:
  Hook(std::weak_ptr<GradientTable> table, size_t index) : table_(std::move(table)), index_(index) {}

  variable_list operator()(const variable_list& outputs, const variable_list& /*inputs*/) override {
    // What is called may remove this hook.
    variable_list same = outputs;
    if (const auto table = table_.lock()) table->on_gradient(index_);
    return same;
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {
    throw std::runtime_error(
        "gradcast needs each gradient when it exists, and compiled autograd runs a whole backward pass at once; turn "
        "torch._dynamo.config.compiled_autograd off");
  }

 private:
  const std::weak_ptr<GradientTable> table_;
  const size_t index_;
};

GradientSink& sink_in(const py::object& capsule) {
  if (PyCapsule_IsValid(capsule.ptr(), kGradientSinkCapsule) == 0)
    throw std::invalid_argument("the engine is of another version of gradcast; install gradcast again");
  return *static_cast<GradientSink*>(PyCapsule_GetPointer(capsule.ptr(), kGradientSinkCapsule));
}

// Also of a frozen parameter, for which torch makes none.
NodePtr accumulator_of(const at::Tensor& parameter) {
  if (parameter.requires_grad()) return impl::grad_accumulator(parameter);
  parameter.set_requires_grad(true);
  auto node = impl::grad_accumulator(parameter);
  parameter.set_requires_grad(false);
  return node;
}

const at::Tensor& tensor_in(const py::handle& object) {
  return THPVariable_Unpack(object.ptr());
}

// This rank's part of a DTensor, also of one that is pending; any other tensor itself. Takes the GIL for classes of
// Python's.
at::Tensor local_of(const at::Tensor& tensor) {
  if (!tensor.key_set().has(c10::DispatchKey::Python)) return tensor;
  const py::gil_scoped_acquire gil;
  const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
  return tensor_in(py::module_::import("gradcast.training.compat.sharding").attr("local_of")(object));
}

int64_t address_of(const at::Tensor& tensor) {
  return reinterpret_cast<int64_t>(tensor.const_data_ptr());
}

int64_t count_hooks(const at::Tensor& parameter, bool own) {
  const auto node = impl::try_get_grad_accumulator(parameter);
  int64_t count = 0;
  if (node)
    for (const auto& hook : node->post_hooks())
      count += (dynamic_cast<const Hook*>(hook.get()) != nullptr) == own ? 1 : 0;
  return count;
}

// Takes the GIL.
void call(const py::object& function, size_t index) {
  const py::gil_scoped_acquire gil;
  if (!function || function.is_none()) return;
  PyObject* result = PyObject_CallFunction(function.ptr(), "n", static_cast<Py_ssize_t>(index));
  if (result == nullptr) {
    python_error error;
    error.persist();
    throw std::move(error);
  }
  Py_DECREF(result);
}

// A call of torch's costs more than this many multiplications. From some size on, torch divides them among threads.
constexpr int64_t kFewElements = 4096;

template <typename Number>
void multiply(const at::Tensor& from, double factor, const at::Tensor& to) {
  const auto* values = static_cast<const Number*>(from.const_data_ptr());
  auto* products = static_cast<Number*>(to.mutable_data_ptr());
  const auto as_torch = static_cast<Number>(factor);
  for (int64_t i = 0; i < to.numel(); ++i)
    products[i] = values[i] * as_torch;
  impl::bump_version(to);
}

// As torch does it, with the same bits. Returns whether these tensors are of a kind for which that is so simple.
bool multiply_few(const at::Tensor& from, double factor, const at::Tensor& to) {
  const bool is_simple = to.is_cpu() && to.numel() <= kFewElements && from.is_non_overlapping_and_dense() &&
                         from.strides() == to.strides() && !from.is_neg() && to.is_non_overlapping_and_dense();
  if (!is_simple) return false;
  if (to.scalar_type() == at::kFloat) {
    multiply<float>(from, factor, to);
  } else if (to.scalar_type() == at::kDouble) {
    multiply<double>(from, factor, to);
  } else {
    return false;
  }
  return true;
}

constexpr uint64_t kFnvPrime = 0x100000001b3;

// In elements, from the first one.
int64_t last_element(const at::Tensor& tensor) {
  int64_t offset = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    offset += (tensor.size(dim) - 1) * tensor.stride(dim);
  return offset;
}

uint64_t bytes_at(const at::Tensor& tensor, int64_t element) {
  const auto width = static_cast<int64_t>(tensor.element_size());
  uint64_t bytes = 0;
  std::memcpy(&bytes, static_cast<const char*>(tensor.const_data_ptr()) + element * width, std::min<int64_t>(width, 8));
  return bytes;
}

// Whether a gradient can be placed without asking anybody: dense, without a graph of its own, like its view, which lies
// where it did.
bool is_ordinary(const at::Tensor& gradient, const at::Tensor& view, int64_t address) {
  return gradient.defined() && !gradient.requires_grad() && gradient.dtype() == view.dtype() &&
         gradient.key_set() == view.key_set() && gradient.sizes() == view.sizes() && address_of(view) == address;
}

bool is_owned(const ParameterState& state, const py::handle& tensor) {
  return std::any_of(state.owned.begin(), state.owned.end(), [&](const py::handle& each) { return each.is(tensor); });
}

}  // namespace

GradientTable::GradientTable(const std::vector<std::string>& names, const std::vector<py::object>& parameters)
    : views_(std::make_shared<py::list>()), task_(kNoTask) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    states_.push_back(std::make_shared<ParameterState>(i, names.at(i), parameters[i], views_));
    index_of_[parameters[i].ptr()] = i;
  }
}

GradientTable::~GradientTable() {
  // A hook that runs on a thread of autograd's may be the last owner.
  const py::gil_scoped_acquire gil;
  for (size_t i = 0; i < hooked_.size(); ++i)
    unhook(i);
  release();
  on_gradient_ = on_placed_ = timed_ = py::object();
}

void GradientTable::release() {
  on_written_ = nullptr;  // it keeps the buffers, and the capsule the engine
  sink_owner_ = py::object();
  forget_layout();
  states_.clear();
  index_of_.clear();
}

void GradientTable::forget_layout() {
  *views_ = py::list();
  index_of_.clear();
  for (const SharedState& state : states_) {
    state->visible_grad.set(py::none());
    state->update_grad.set(py::none());
    index_of_[state->parameter.ptr()] = state->index;
  }
}

SharedState GradientTable::of(const py::handle& tensor) const {
  const auto found = index_of_.find(tensor.ptr());
  if (found != index_of_.end()) {
    const SharedState& state = states_[found->second];
    if (state->parameter.is(tensor) || state->visible_grad.is(tensor.ptr())) return state;
  }
  for (const SharedState& state : states_)
    if ((state->visible_grad.is_own() && state->visible_grad.is(tensor.ptr())) || is_owned(*state, tensor))
      return state;
  return nullptr;
}

void GradientTable::follow_layout(const py::list& views, std::vector<Place> places) {
  const py::list before = std::exchange(*views_, views);
  index_of_.clear();
  addresses_.clear();
  places_ = std::move(places);
  for (const SharedState& state : states_) {
    const auto view = py::reinterpret_borrow<py::object>(views[state->index]);
    if (!before.is(views) && state->visible_grad.is_view()) {
      const py::object old = before[state->index];
      const at::Tensor& gradient = state->tensor().grad();
      const bool is_used = state->update_grad.is_view();
      const bool has_moved = gradient.is_same(tensor_in(view));
      const py::object now = has_moved ? view : gradient.is_same(tensor_in(old)) ? old : py::object(py::none());
      state->visible_grad.set(now);
      if (is_used) state->update_grad.set(now);
    }
    index_of_[state->parameter.ptr()] = index_of_[view.ptr()] = state->index;
    addresses_.push_back(address_of(tensor_in(view)));
  }
}

void GradientTable::install(const py::object& sink, OnWritten on_written, std::optional<double> norm_type,
                            py::object on_gradient, py::object on_placed) {
  sink_ = &sink_in(sink);
  sink_owner_ = sink;
  on_written_ = std::move(on_written);
  norm_type_ = norm_type;
  on_gradient_ = std::move(on_gradient);
  on_placed_ = std::move(on_placed);
  hooked_.resize(states_.size());
  for (size_t i = 0; i < hooked_.size(); ++i)
    hook(i, accumulator_of(states_[i]->tensor()));
}

void GradientTable::hook(size_t index, NodePtr node) {
  const uintptr_t key = node->add_post_hook(std::make_unique<Hook>(weak_from_this(), index));
  hooked_[index] = {std::move(node), key};
}

void GradientTable::unhook(size_t index) {
  Hooked old = std::exchange(hooked_[index], {});
  if (old.node) old.node->del_post_hook(old.key);
}

States GradientTable::refresh() {
  States found;
  for (size_t i = 0; i < hooked_.size(); ++i) {
    const at::Tensor parameter = static_cast<AccumulateGrad*>(hooked_[i].node.get())->variable;
    if (impl::try_get_grad_accumulator(parameter) != hooked_[i].node) {
      unhook(i);
      hook(i, accumulator_of(parameter));
    }
    if (impl::post_acc_grad_hooks(parameter) != nullptr) found.push_back(states_[i]);
  }
  return found;
}

void GradientTable::remove() {
  disarm();
  for (size_t i = 0; i < hooked_.size(); ++i)
    unhook(i);
  hooked_.clear();
  on_gradient_ = on_placed_ = timed_ = py::none();
}

SharedState GradientTable::begin_step(py::object timed) {
  sent_count_ = 0;
  is_timed_ = !timed.is_none();
  timed_ = std::move(timed);
  arrived_.assign(places_.size(), false);
  return enter(states_, Phase::kIdle, {Phase::kIdle, Phase::kArrived});
}

void GradientTable::note_arrived(const std::vector<size_t>& indices) {
  for (const size_t index : indices)
    arrived_.at(index) = true;
}

std::vector<size_t> GradientTable::missing(const std::vector<size_t>& indices) const {
  std::vector<size_t> found;
  std::copy_if(indices.begin(), indices.end(), std::back_inserter(found),
               [this](size_t index) { return !arrived_.at(index); });
  return found;
}

States GradientTable::arrived(const States& states) const {
  return those(states, [this](const SharedState& state) { return arrived_.at(state->index); });
}

States GradientTable::idle() const {
  return those(states_, [](const SharedState& state) { return state->phase == Phase::kIdle; });
}

States GradientTable::frozen_for(int64_t steps) const {
  return those(states_, [steps](const SharedState& state) { return state->frozen_steps >= steps; });
}

py::list GradientTable::arm(int64_t task, const std::vector<int64_t>& special, double scale) {
  std::vector<std::optional<Armed>> armed(states_.size());
  for (const SharedState& state : states_) {
    const size_t i = state->index;
    if (!state->updated_late)
      armed[i] = Armed{tensor_in((*views_)[i]), addresses_[i], !gradient_of(i).defined(), scale};
  }
  for (const int64_t index : special)
    armed.at(index).reset();
  py::list unmade;
  for (size_t i = 0; i < armed.size(); ++i)
    if (armed[i] && armed[i]->is_pending) unmade.append((*views_)[i]);
  replace_armed(task, std::move(armed));
  return unmade;
}

// Drops what was armed before without the lock: that may free an object of Python's, which may call these functions.
void GradientTable::replace_armed(int64_t task, std::vector<std::optional<Armed>> armed) {
  const MutexLock lock(mutex_);
  task_ = task;
  armed_.swap(armed);
}

void GradientTable::disarm() {
  replace_armed(kNoTask, {});
}

std::vector<std::pair<int64_t, at::Tensor>> GradientTable::take_norms() {
  const MutexLock lock(mutex_);
  return std::exchange(norms_, {});
}

States GradientTable::with_gradient() const {
  States found;
  for (size_t i = 0; i < hooked_.size(); ++i)
    if (gradient_of(i).defined()) found.push_back(states_[i]);
  return found;
}

uint64_t GradientTable::fingerprint() const {
  uint64_t hash = 0;
  for (const Hooked& hooked : hooked_) {
    const at::Tensor parameter = local_of(static_cast<AccumulateGrad*>(hooked.node.get())->variable);
    if (!parameter.is_cpu() || parameter.numel() == 0) continue;
    for (const int64_t element : {int64_t{0}, last_element(parameter)})
      hash = (hash ^ bytes_at(parameter, element)) * kFnvPrime;
  }
  return hash;
}

void GradientTable::on_gradient(size_t index) {
  const std::optional<Armed> armed = claim(index);
  if (!armed || !is_ordinary(gradient_of(index), armed->view, armed->address) || !place(index, *armed, false))
    call(on_gradient_, index);
}

at::Tensor& GradientTable::gradient_of(size_t index) const {
  return static_cast<AccumulateGrad*>(hooked_[index].node.get())->variable.mutable_grad();
}

// Takes a parameter's turn in this backward pass, if it has one.
std::optional<GradientTable::Armed> GradientTable::claim(size_t index) {
  const MutexLock lock(mutex_);
  if (task_ == kNoTask || task_ != torch::autograd::get_current_graph_task_id()) return std::nullopt;
  return std::exchange(armed_[index], std::nullopt);
}

bool GradientTable::place(size_t index, double scale, bool is_apart) {
  claim(index);  // this is its turn
  Armed armed{at::Tensor(), 0, true, scale};
  {
    const py::gil_scoped_acquire gil;
    armed.view = tensor_in((*views_)[index]);
  }
  return place(index, armed, is_apart);
}

bool GradientTable::place(size_t index, const Armed& armed, bool is_apart) {
  ParameterState& state = *states_[index];
  at::Tensor& gradient = gradient_of(index);
  at::Tensor view = armed.view;
  std::optional<at::Tensor> norm;
  {
    const at::NoGradGuard no_grad;
    // A program's TorchDispatchMode, torch's stream checker for one, may look at the memory of the view.
    const WithoutTorchFunction without_torch_function;
    const at::Tensor values = local_of(gradient);
    if (armed.scale == 0) {
      view.zero_();  // a batch of nothing has NaNs
    } else if (!multiply_few(values, armed.scale, view)) {
      at::mul_out(view, values, at::native::wrapped_scalar_tensor(armed.scale));
    }
    if (!is_apart) gradient = view;
    if (norm_type_) norm = at::linalg_vector_norm(view, *norm_type_);
  }
  show(state, gradient, is_apart);
  if (!armed.is_pending) call(on_placed_, index);
  if (is_timed_) call(timed_, index);
  if (state.locally_unused.is_none()) state.frozen_steps = 0;
  state.phase = Phase::kSent;
  ++sent_count_;
  if (norm) {
    const MutexLock lock(mutex_);
    norms_.emplace_back(static_cast<int64_t>(index), *norm);
  }
  const auto& [tensor, buffer, lo_bytes, hi_bytes] = places_.at(index);
  on_written_(buffer, lo_bytes, hi_bytes);
  if (sink_->ready(tensor)) return true;
  state.phase = Phase::kIdle;
  --sent_count_;
  return false;
}

// Notes what .grad holds from now on. Needs the GIL only where it was, or is, a tensor outside of the buffer.
void GradientTable::show(ParameterState& state, const at::Tensor& gradient, bool is_apart) {
  if (!is_apart && !state.visible_grad.is_own() && !state.update_grad.is_own()) {
    state.visible_grad.set_to_view();
    state.update_grad.set_to_view();
    return;
  }
  const py::gil_scoped_acquire gil;
  const auto shown = py::reinterpret_steal<py::object>(THPVariable_Wrap(gradient));
  state.visible_grad.set(shown);
  state.update_grad.set(shown);
  state.copy_due = is_apart;
}

std::vector<int64_t> foreign_hooks(const std::vector<at::Tensor>& parameters) {
  std::vector<int64_t> counts;
  for (const at::Tensor& parameter : parameters)
    counts.push_back(count_hooks(parameter, false));
  return counts;
}

std::vector<int64_t> own_hooks(const std::vector<at::Tensor>& parameters) {
  std::vector<int64_t> found;
  for (size_t i = 0; i < parameters.size(); ++i)
    if (count_hooks(parameters[i], true) > 0) found.push_back(static_cast<int64_t>(i));
  return found;
}

}  // namespace gradcast
