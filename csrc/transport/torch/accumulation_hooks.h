// Hooks behind the accumulation of gradients, like those of DistributedDataParallel's reducer.
//
// Between arm() and disarm() a hook sends an ordinary gradient without Python, as gradient_hooks.py does otherwise: it
// scales the gradient into its view of the buffer, makes the view the .grad, and tells the engine. What has been sent so
// is fetched with take_sent(). All other gradients go to the Python function.
//
// So that nobody uses a gradient inside backward, the views are made pending beforehand, all at once: arm() returns them.
// Where there is a .grad already, because the program has not set it to None, that is what autograd adds to, and the
// view becomes pending when it is sent.
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
#include <tuple>
#include <utility>
#include <vector>

#include "gradcast/gradient_sink.h"
#include "gradcast/types.h"
#include "platform/sync.h"

namespace gradcast {

// A std::shared_ptr in torch 2.11, a c10::intrusive_ptr in 2.15.
using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

class AccumulationHooks : public std::enable_shared_from_this<AccumulationHooks> {
 public:
  // C10dTransport::on_written.
  using OnWritten = std::function<void(int32_t buffer, int64_t lo_bytes, int64_t hi_bytes)>;
  // `on_gradient(index)` is called for gradients that are not sent here, `on_view(index)` before a gradient is sent whose
  // view is not pending yet. `norm_type`: the norm of what is sent is kept for take_sent().
  AccumulationHooks(const pybind11::object& sink, OnWritten on_written, std::optional<double> norm_type,
                    pybind11::object on_gradient, pybind11::object on_view);
  ~AccumulationHooks();
  AccumulationHooks(const AccumulationHooks&) = delete;
  AccumulationHooks& operator=(const AccumulationHooks&) = delete;

  // Hooks these parameters, also frozen ones.
  void install(const std::vector<at::Tensor>& parameters);
  // Hooks parameters again that have a new node. Returns those that have or had post-accumulate hooks of the program.
  std::vector<int64_t> refresh();
  void remove();  // idempotent

  // By parameter: its tensor in the engine's profile, its buffer, and the bytes there that are written with it.
  using Place = std::tuple<int32_t, int32_t, int64_t, int64_t>;
  // `addresses`: those of the views.
  void follow_layout(std::vector<Place> places, std::vector<int64_t> addresses);
  // Gradients of all parameters but the `special` ones are ordinary in the outermost backward pass `task`, once each.
  // `views`: of all parameters. `scale`: what gradients are multiplied by. Returns the views of ordinary gradients that
  // do not exist yet.
  pybind11::list arm(int64_t task, const pybind11::list& views, const std::vector<int64_t>& special, double scale)
      GC_EXCLUDES(mutex_);
  void disarm() GC_EXCLUDES(mutex_);
  // The parameters whose gradients were sent since the last call, in order, and the norms of what was sent.
  std::pair<std::vector<int64_t>, std::vector<at::Tensor>> take_sent() GC_EXCLUDES(mutex_);

  // Parameters that have a gradient.
  std::vector<int64_t> with_gradient() const;
  // Another number when parameters in host memory have changed, however that was; the same on ranks where they are the
  // same. A hash of each one's first and last bytes.
  uint64_t fingerprint() const;

  // For the hooks. Throws python_error, and what torch throws.
  void on_gradient(size_t index) GC_EXCLUDES(mutex_);

 private:
  struct Armed {
    at::Tensor view;
    int64_t address = 0;
    bool is_pending = false;  // the view
    double scale = 0;
    at::Tensor scale_tensor;  // a number, for torch; one for all
  };

  void replace_armed(int64_t task, std::vector<std::optional<Armed>> armed) GC_EXCLUDES(mutex_);
  at::Tensor& gradient_of(size_t index) const;
  std::optional<Armed> claim(size_t index) GC_EXCLUDES(mutex_);
  bool send(size_t index) GC_EXCLUDES(mutex_);
  std::optional<at::Tensor> put_into_view(size_t index, at::Tensor& gradient, const Armed& armed) const;
  void hook(size_t index, NodePtr node);
  void unhook(size_t index);

  pybind11::object sink_owner_;  // a capsule; it keeps the engine
  GradientSink& sink_;
  const OnWritten on_written_;
  const std::optional<double> norm_type_;
  pybind11::object on_gradient_, on_view_;

  struct Hooked {
    NodePtr node;       // AccumulateGrad
    uintptr_t key = 0;  // of the hook, for the node
  };
  std::vector<Hooked> hooked_;
  std::vector<Place> places_;
  std::vector<int64_t> addresses_;

  Mutex mutex_;
  int64_t task_ GC_GUARDED_BY(mutex_);
  std::vector<std::optional<Armed>> armed_ GC_GUARDED_BY(mutex_);
  std::vector<int64_t> sent_ GC_GUARDED_BY(mutex_);
  std::vector<at::Tensor> norms_ GC_GUARDED_BY(mutex_);
};

// How many hooks run after the accumulation of each parameter's gradient, without those of this file. Only C++ and
// Node.register_hook() install such hooks: DistributedDataParallel's reducer, and whatever else reduces gradients.
std::vector<int64_t> foreign_hooks(const std::vector<at::Tensor>& parameters);

// Positions of the parameters that have a hook of this file.
std::vector<int64_t> own_hooks(const std::vector<at::Tensor>& parameters);

}  // namespace gradcast
