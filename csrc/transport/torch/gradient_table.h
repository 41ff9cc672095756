// The gradients of a session, by parameter: the way from autograd to the engine, like DistributedDataParallel's
// Reducer.
//
// A hook behind the accumulation of each gradient calls place(): it scales the gradient into its view of the buffer,
// makes the view the .grad, and notifies the engine. Between arm() and disarm() that needs no Python for ordinary
// gradients. All others go to a function in Python: the first one of a backward pass, which opens the step, and those
// kept by the program, frozen, made twice, sparse, ... (gradient_hooks.py). It calls place(), too, or raises.
//
// So that nobody uses a gradient inside backward, the views are made pending beforehand, all at once: arm() returns
// them. Where there is a .grad already, because the program has not set it to None, autograd adds to that, and the view
// becomes pending when it is placed.
//
// The hooks keep autograd's nodes alive, and so the parameters. A parameter whose type or device has changed has a new
// node; refresh() hooks that.
//
// Thread safety: any thread; hooks run on autograd's, everything else with the GIL. REQUIRES: refresh(),
// follow_layout() and remove() do not run while another thread is in backward.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "gradcast/gradient_sink.h"
#include "gradcast/types.h"
#include "platform/sync.h"
#include "transport/torch/parameter_state.h"

namespace gradcast {

// A std::shared_ptr in torch 2.11, a c10::intrusive_ptr in 2.15.
using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

class GradientTable : public std::enable_shared_from_this<GradientTable> {
 public:
  // C10dTransport::on_written.
  using OnWritten = std::function<void(int32_t buffer, int64_t lo_bytes, int64_t hi_bytes)>;
  // By parameter: its tensor in the engine's profile, its buffer, and the bytes there that are written with it.
  using Place = std::tuple<int32_t, int32_t, int64_t, int64_t>;

  GradientTable(const std::vector<std::string>& names, const std::vector<pybind11::object>& parameters);
  ~GradientTable();
  GradientTable(const GradientTable&) = delete;
  GradientTable& operator=(const GradientTable&) = delete;

  const States& states() const { return states_; }
  // The parameter whose value or visible gradient the tensor is, or that the tensor is owned for; or null.
  SharedState of(const pybind11::handle& tensor) const;

  // `views`: the list of gradient_buffers.py, of these parameters and the values sent with them. A visible gradient
  // that was a view is the new one from now on, or, if the program has kept the old one in .grad, that.
  void follow_layout(const pybind11::list& views, std::vector<Place> places);

  // Hooks all parameters, also frozen ones. `sink`: a capsule. `on_gradient(index)` is called for gradients that are
  // not ordinary, `on_placed(index)` for one that is, and whose view is not pending yet, before it is sent.
  // `norm_type`: the norm of each sent gradient is kept for take_norms().
  void install(const pybind11::object& sink, OnWritten on_written, std::optional<double> norm_type,
               pybind11::object on_gradient, pybind11::object on_placed);
  // Hooks parameters again that have a new node. Returns those that have or had post-accumulate hooks of the program.
  States refresh();
  void remove();  // idempotent; the table can be installed again
  // Refers to no gradient until follow_layout(). REQUIRES: nothing is pending.
  void forget_layout();
  // Refers to no parameter, no gradient and no engine any more. REQUIRES: remove().
  void release();

  // Begins a step: nothing is sent yet. `timed(index)`, if it is not None, is called before each of its gradients is
  // sent. Returns a parameter whose gradient has not arrived, or whose update is pending, if there is one.
  SharedState begin_step(pybind11::object timed);
  // Gradients, and what is sent with them, that have arrived in this step; `missing`: those of these that have not.
  void note_arrived(const std::vector<size_t>& indices);
  std::vector<size_t> missing(const std::vector<size_t>& indices) const;
  States arrived(const States& states) const;
  // Parameters that no gradient of this step has been sent of, and those frozen in so many steps in a row.
  States idle() const;
  States frozen_for(int64_t steps) const;
  // Gradients of all parameters but the `special` ones are ordinary in the outermost backward pass `task`, once each.
  // Returns the views of ordinary gradients that do not exist yet.
  pybind11::list arm(int64_t task, const std::vector<int64_t>& special, double scale) GC_EXCLUDES(mutex_);
  void disarm() GC_EXCLUDES(mutex_);
  // The number of gradients of this step that have been sent.
  int64_t sent_count() const { return sent_count_; }
  // The norms of the gradients sent since the last call, by parameter.
  std::vector<std::pair<int64_t, at::Tensor>> take_norms() GC_EXCLUDES(mutex_);

  // Writes the .grad of a parameter, times `scale`, into its view, and sends it. A scale of 0 writes zeros, whatever
  // the gradient holds. `is_apart`: the .grad keeps memory of its own. Returns false if the engine refuses it. Without
  // the GIL. REQUIRES: the resulting .grad is pending, the view lies in the buffer, and the gradient is dense and needs
  // no gradient itself.
  bool place(size_t index, double scale, bool is_apart) GC_EXCLUDES(mutex_);

  // Parameters that have a gradient.
  States with_gradient() const;
  // A hash of the first and last bytes of each parameter in host memory: it shows changes by any means, and is the same
  // on ranks with the same parameters.
  uint64_t fingerprint() const;

  // For the hooks. Throws python_error, and what torch throws.
  void on_gradient(size_t index) GC_EXCLUDES(mutex_);

 private:
  struct Hooked {
    NodePtr node;       // AccumulateGrad
    uintptr_t key = 0;  // of the hook, for the node
  };
  // Data for a hook of the pass that runs. The view is held, since taking a first reference to it asks for the GIL.
  struct Armed {
    at::Tensor view;
    int64_t address = 0;
    bool is_pending = false;  // the view
    double scale = 0;
  };

  at::Tensor& gradient_of(size_t index) const;
  void replace_armed(int64_t task, std::vector<std::optional<Armed>> armed) GC_EXCLUDES(mutex_);
  std::optional<Armed> claim(size_t index) GC_EXCLUDES(mutex_);
  bool place(size_t index, const Armed& armed, bool is_apart) GC_EXCLUDES(mutex_);
  void show(ParameterState& state, const at::Tensor& gradient, bool is_apart);
  void hook(size_t index, NodePtr node);
  void unhook(size_t index);

  const Views views_;
  States states_;
  std::unordered_map<PyObject*, size_t> index_of_;  // by parameter and by view
  std::vector<Place> places_;
  std::vector<int64_t> addresses_;  // of the views
  std::vector<bool> arrived_;       // as places_

  pybind11::object sink_owner_;  // a capsule; it keeps the engine
  GradientSink* sink_ = nullptr;
  OnWritten on_written_;
  std::optional<double> norm_type_;
  pybind11::object on_gradient_, on_placed_;
  std::vector<Hooked> hooked_;

  pybind11::object timed_;
  Atomic<bool> is_timed_ = false;
  Atomic<int64_t> sent_count_ = 0;

  Mutex mutex_;
  int64_t task_ GC_GUARDED_BY(mutex_);
  std::vector<std::optional<Armed>> armed_ GC_GUARDED_BY(mutex_);
  std::vector<std::pair<int64_t, at::Tensor>> norms_ GC_GUARDED_BY(mutex_);
};

// The number of hooks behind the accumulation of each parameter's gradient, without those of this file. Only C++ and
// Node.register_hook() install such hooks: DistributedDataParallel's reducer, and whatever else reduces gradients.
std::vector<int64_t> foreign_hooks(const std::vector<at::Tensor>& parameters);

// Positions of the parameters that have a hook of this file.
std::vector<int64_t> own_hooks(const std::vector<at::Tensor>& parameters);

}  // namespace gradcast
