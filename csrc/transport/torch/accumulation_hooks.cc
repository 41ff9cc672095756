#include "transport/torch/accumulation_hooks.h"

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
  Hook(std::weak_ptr<AccumulationHooks> hooks, size_t index) : hooks_(std::move(hooks)), index_(index) {}

  variable_list operator()(const variable_list& outputs, const variable_list& /*inputs*/) override {
    // What is called may remove this hook.
    variable_list same = outputs;
    if (const auto hooks = hooks_.lock()) hooks->on_gradient(index_);
    return same;
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {
    throw std::runtime_error(
        "gradcast needs each gradient when it exists, and compiled autograd runs a whole backward pass at once; turn "
        "torch._dynamo.config.compiled_autograd off");
  }

 private:
  const std::weak_ptr<AccumulationHooks> hooks_;
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

}  // namespace

AccumulationHooks::AccumulationHooks(const py::object& sink, OnWritten on_written, std::optional<double> norm_type,
                                     py::object on_gradient, py::object on_view)
    : sink_owner_(sink),
      sink_(sink_in(sink)),
      on_written_(std::move(on_written)),
      norm_type_(norm_type),
      on_gradient_(std::move(on_gradient)),
      on_view_(std::move(on_view)),
      task_(kNoTask) {}

AccumulationHooks::~AccumulationHooks() {
  // A hook that runs on a thread of autograd's may be the last owner.
  const py::gil_scoped_acquire gil;
  for (size_t i = 0; i < hooked_.size(); ++i)
    unhook(i);
  on_gradient_ = on_view_ = py::object();
  sink_owner_ = py::object();
}

void AccumulationHooks::install(const std::vector<at::Tensor>& parameters) {
  hooked_.resize(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i)
    hook(i, accumulator_of(parameters[i]));
}

void AccumulationHooks::hook(size_t index, NodePtr node) {
  const uintptr_t key = node->add_post_hook(std::make_unique<Hook>(weak_from_this(), index));
  hooked_[index] = {std::move(node), key};
}

void AccumulationHooks::unhook(size_t index) {
  Hooked old = std::exchange(hooked_[index], {});
  if (old.node) old.node->del_post_hook(old.key);
}

std::vector<int64_t> AccumulationHooks::refresh() {
  std::vector<int64_t> found;
  for (size_t i = 0; i < hooked_.size(); ++i) {
    const at::Tensor parameter = static_cast<AccumulateGrad*>(hooked_[i].node.get())->variable;
    if (impl::try_get_grad_accumulator(parameter) != hooked_[i].node) {
      unhook(i);
      hook(i, accumulator_of(parameter));
    }
    if (impl::post_acc_grad_hooks(parameter) != nullptr) found.push_back(static_cast<int64_t>(i));
  }
  return found;
}

void AccumulationHooks::remove() {
  disarm();
  for (size_t i = 0; i < hooked_.size(); ++i)
    unhook(i);
  hooked_.clear();
  on_gradient_ = on_view_ = py::none();
}

void AccumulationHooks::follow_layout(std::vector<Place> places, std::vector<int64_t> addresses) {
  places_ = std::move(places);
  addresses_ = std::move(addresses);
}

py::list AccumulationHooks::arm(int64_t task, const py::list& views, const std::vector<int64_t>& special,
                                double scale) {
  const at::Tensor scale_tensor = at::native::wrapped_scalar_tensor(scale);
  std::vector<std::optional<Armed>> armed;
  armed.reserve(hooked_.size());
  for (size_t i = 0; i < hooked_.size(); ++i)
    armed.push_back(Armed{THPVariable_Unpack(py::handle(views[i]).ptr()), addresses_.at(i), !gradient_of(i).defined(),
                          scale, scale_tensor});
  for (const int64_t index : special)
    armed.at(index).reset();
  py::list unmade;
  for (size_t i = 0; i < armed.size(); ++i)
    if (armed[i] && armed[i]->is_pending) unmade.append(views[i]);
  replace_armed(task, std::move(armed));
  return unmade;
}

// Drops what was armed before without the lock: that may free an object of Python's, which may call these functions.
void AccumulationHooks::replace_armed(int64_t task, std::vector<std::optional<Armed>> armed) {
  const MutexLock lock(mutex_);
  task_ = task;
  armed_.swap(armed);
}

void AccumulationHooks::disarm() {
  replace_armed(kNoTask, {});
}

std::pair<std::vector<int64_t>, std::vector<at::Tensor>> AccumulationHooks::take_sent() {
  const MutexLock lock(mutex_);
  return {std::exchange(sent_, {}), std::exchange(norms_, {})};
}

std::vector<int64_t> AccumulationHooks::with_gradient() const {
  std::vector<int64_t> found;
  for (size_t i = 0; i < hooked_.size(); ++i)
    if (gradient_of(i).defined()) found.push_back(static_cast<int64_t>(i));
  return found;
}

uint64_t AccumulationHooks::fingerprint() const {
  uint64_t hash = 0;
  for (const Hooked& hooked : hooked_) {
    const at::Tensor& parameter = static_cast<AccumulateGrad*>(hooked.node.get())->variable;
    if (!parameter.is_cpu() || parameter.numel() == 0) continue;
    for (const int64_t element : {int64_t{0}, last_element(parameter)})
      hash = (hash ^ bytes_at(parameter, element)) * kFnvPrime;
  }
  return hash;
}

void AccumulationHooks::on_gradient(size_t index) {
  if (!send(index)) call(on_gradient_, index);
}

at::Tensor& AccumulationHooks::gradient_of(size_t index) const {
  return static_cast<AccumulateGrad*>(hooked_[index].node.get())->variable.mutable_grad();
}

// Takes a parameter's turn in this backward pass, if it has one.
std::optional<AccumulationHooks::Armed> AccumulationHooks::claim(size_t index) {
  const MutexLock lock(mutex_);
  if (task_ == kNoTask || task_ != torch::autograd::get_current_graph_task_id()) return std::nullopt;
  return std::exchange(armed_[index], std::nullopt);
}

bool AccumulationHooks::send(size_t index) {
  const std::optional<Armed> armed = claim(index);
  if (!armed) return false;
  at::Tensor& gradient = gradient_of(index);
  const bool is_ordinary = gradient.defined() && !gradient.requires_grad() && gradient.dtype() == armed->view.dtype() &&
                           gradient.key_set() == armed->view.key_set() && gradient.sizes() == armed->view.sizes() &&
                           reinterpret_cast<int64_t>(armed->view.const_data_ptr()) == armed->address;
  if (!is_ordinary) return false;
  const std::optional<at::Tensor> norm = put_into_view(index, gradient, *armed);
  const auto& [tensor, buffer, lo_bytes, hi_bytes] = places_.at(index);
  on_written_(buffer, lo_bytes, hi_bytes);
  if (!sink_.ready(tensor)) return false;  // the same call from Python raises the error
  const MutexLock lock(mutex_);
  sent_.push_back(static_cast<int64_t>(index));
  if (norm) norms_.push_back(*norm);
  return true;
}

// The same operations as in Python, for the same bits. Returns the norm of what is sent, if that is wanted.
std::optional<at::Tensor> AccumulationHooks::put_into_view(size_t index, at::Tensor& gradient,
                                                           const Armed& armed) const {
  const at::NoGradGuard no_grad;
  at::Tensor view = armed.view;
  if (!armed.is_pending) call(on_view_, index);
  // A program's TorchDispatchMode, torch's stream checker for one, may look at the memory of the view.
  const WithoutTorchFunction without_torch_function;
  if (gradient.is_same(view)) {
    view.mul_(armed.scale_tensor);
  } else {
    if (!multiply_few(gradient, armed.scale, view)) at::mul_out(view, gradient, armed.scale_tensor);
    gradient = view;
  }
  if (!norm_type_) return std::nullopt;
  return at::linalg_vector_norm(view, *norm_type_);
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
