// The Python module `_c10d`: a transport over torch.distributed, handed to the engine of `_core` as a capsule.
//
// It also has what Python cannot do safely or cheaply: messages between ranks, DDP's buckets, hooks that send gradients,
// many tensors at once, and other owners of a tensor.
//
// Compiled for one version of torch; `_core` serves all of them, so nothing but capsules passes between the two.
#include <pybind11/functional.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/capsule.h"
#include "gradcast/transport.h"
#include "transport/torch/bucket_hook.h"
#include "transport/torch/c10d_transport.h"
#include "transport/torch/control.h"
#include "transport/torch/gradient_table.h"
#include "transport/torch/owners.h"
#include "transport/torch/tensor_lists.h"
#include "transport/torch/update_marks.h"

namespace gradcast {

namespace {

using SharedTransport = std::shared_ptr<C10dTransport>;

// Destroying a transport joins its threads, which must not happen with the GIL held.
SharedTransport make_transport(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                               const std::vector<at::Tensor>& buffers, const std::string& wire,
                               const std::vector<int>& host_of, bool on_current_stream, bool has_high_priority,
                               bool times) {
  if (!group) throw std::invalid_argument("a transport needs a process group, not None");
  const auto destroy = [](C10dTransport* transport) {
    if (PyGILState_Check() != 0) {
      const py::gil_scoped_release release;
      delete transport;
    } else {
      delete transport;
    }
  };
  const RunsOn runs_on = on_current_stream ? RunsOn::kCurrentStream : RunsOn::kOwnStream;
  return SharedTransport(new C10dTransport(group, buffers, wire, host_of, runs_on, {has_high_priority, times}),
                         destroy);
}

void set_groups(C10dTransport& transport, int32_t buffer,
                const std::vector<std::tuple<int64_t, int64_t, bool, int32_t>>& segments, const at::Tensor& residual) {
  std::vector<GroupSegment> given;
  for (const auto& [first, count, is_exact, first_owner] : segments)
    given.push_back({first, count, is_exact ? Encoding::kFloat32 : Encoding::kInt8, first_owner});
  transport.set_groups(buffer, std::move(given), residual);
}

std::vector<py::bytes> gather_bytes(c10d::ProcessGroup& group, const std::string& own, const at::Device& device) {
  std::vector<std::string> texts;
  {
    const py::gil_scoped_release released;
    texts = gather(group, own, device);
  }
  return {texts.begin(), texts.end()};
}

py::bytes bytes_from_first(c10d::ProcessGroup& group, const std::string& own, const at::Device& device) {
  std::string text;
  {
    const py::gil_scoped_release released;
    text = from_first(group, own, device);
  }
  return text;
}

// Results of average_bucket. Dropping the last reference to a value that Python knows takes the GIL, and that must not
// happen on the backend's thread, which drops its reference some time after it has woken the waiter. So each result is
// kept here until nobody else has it. The list itself is never freed: at the end of the process Python is gone.
std::vector<c10::intrusive_ptr<c10::ivalue::PyObjectHolder>>& kept_results() {
  static auto* kept = new std::vector<c10::intrusive_ptr<c10::ivalue::PyObjectHolder>>();
  return *kept;
}

void drop_results() {
  std::erase_if(kept_results(), [](const auto& each) { return each.use_count() == 1; });
}

std::shared_ptr<torch::jit::PythonFutureWrapper> average_bucket_in_python(c10d::ProcessGroup& group,
                                                                          const c10d::GradBucket& bucket,
                                                                          int64_t piece_bytes) {
  c10::IValue result = torch::jit::toIValue(py::cast(bucket.getBuffer()), c10::PyObjectType::get());
  drop_results();
  kept_results().push_back(result.toPyObjectHolder());
  const py::gil_scoped_release released;
  return std::make_shared<torch::jit::PythonFutureWrapper>(
      average_bucket(group, bucket, piece_bytes, std::move(result)));
}

void connect_for(const c10::intrusive_ptr<c10d::ProcessGroup>& group, at::Device device, const std::string& op,
                 at::ScalarType type, int64_t size_bytes, std::optional<at::ScalarType> wire) {
  for (const Op each : {Op::kAllReduce, Op::kReduceScatter, Op::kAllGather})
    if (op == to_string(each)) return connect(*group, device, {each, type, size_bytes, wire});
  throw std::invalid_argument("there is no operation " + op);
}

void bind_tensor_lists(py::module_& module) {
  module.def("mark_pending", &mark_pending, py::arg("base"), py::arg("tensors"), py::arg("class_for"),
             "Makes tensors pending: see pending.py. Returns how many were not.");
  module.def("clear_pending", &clear_pending, py::arg("base"), py::arg("tensors"));
  module.def("gradient_attribute", &gradient_attribute, py::arg("base"), py::arg("asked_for"),
             "torch's attribute `grad` for a class of pending tensors, which asks that class only as long as the set "
             "`asked_for` is not empty.");
  module.def("swap_gradients", &swap_gradients, py::arg("parameters"), py::arg("gradients"),
             "Sets the .grad of these parameters, unchecked, and returns the former ones.");
  module.def("hold_gradients", &hold_gradients, py::arg("parameters"), py::arg("gradients"),
             "Whether the .grad of each parameter is this tensor.");
  module.def("kinds", &kinds, py::arg("tensors"), "The types, devices and contents of these tensors, for comparison.");
  module.def("contain", &contain, py::arg("containers"), py::arg("expected"),
             "Whether the values of these dicts and lists, one after the other, are these objects.");
  module.def("lie_at", &lie_at, py::arg("tensors"), py::arg("addresses"),
             "Whether each of these tensors still begins at this address.");
}

// Without the GIL, except for a transport of the tests' own.
GradientTable::OnWritten on_written_of(const py::object& transport) {
  if (!py::isinstance<C10dTransport>(transport)) return transport.attr("on_written").cast<GradientTable::OnWritten>();
  return [shared = transport.cast<SharedTransport>()](int32_t buffer, int64_t lo_bytes, int64_t hi_bytes) {
    shared->on_written(buffer, lo_bytes, hi_bytes);
  };
}

void install(GradientTable& table, const py::object& sink, const py::object& transport, std::optional<double> norm_type,
             py::object on_gradient, py::object on_placed) {
  table.install(sink, on_written_of(transport), norm_type, std::move(on_gradient), std::move(on_placed));
}

void bind_gradient_table(py::module_& module) {
  module.def("foreign_hooks", &foreign_hooks, py::arg("parameters"),
             "How many hooks of C++ other than gradcast's run behind the accumulation of each parameter's gradient.");
  module.def("own_hooks", &own_hooks, py::arg("parameters"), "Positions of the parameters that gradcast has hooked.");
  bind_parameter_states(module);
  py::class_<GradientTable, std::shared_ptr<GradientTable>>(
      module, "GradientTable",
      "The gradients of a session. Its hooks place and send ordinary ones without Python: see gradient_table.h.")
      .def(py::init<const std::vector<std::string>&, const std::vector<py::object>&>(), py::arg("names"),
           py::arg("parameters"))
      .def_property_readonly("states", &GradientTable::states)
      .def("of", &GradientTable::of, py::arg("tensor"),
           "The state whose parameter or visible gradient the tensor is, or that it is owned for; or None.")
      .def("follow_layout", &GradientTable::follow_layout, py::arg("views"), py::arg("places"),
           "Gradients lie in these views from now on; the list is kept, and may change.")
      .def("install", &install, py::arg("sink"), py::arg("transport"), py::arg("norm_type"), py::arg("on_gradient"),
           py::arg("on_placed"), "Hooks all parameters.")
      .def("refresh", &GradientTable::refresh,
           "Hooks parameters again that were converted. Those that have or had post-accumulate hooks of the program.")
      .def("remove", &GradientTable::remove, "Removes the hooks.")
      .def("forget_layout", &GradientTable::forget_layout, "Lets go of all gradients, until follow_layout().")
      .def("release", &GradientTable::release, "Lets go of all parameters and gradients.")
      .def("begin_step", &GradientTable::begin_step, py::arg("timed"),
           "`timed(index)`, if it is not None, is called for each gradient of the step before that is sent. A "
           "parameter of the step before that is not finished, or None.")
      .def("note_arrived", &GradientTable::note_arrived, py::arg("indices"), "These have arrived in this step.")
      .def("missing", &GradientTable::missing, py::arg("indices"), "Those that have not arrived in this step.")
      .def("arrived", &GradientTable::arrived, py::arg("states"), "Those whose gradients have arrived in this step.")
      .def("idle", &GradientTable::idle, "Parameters that no gradient of this step has been sent of.")
      .def("frozen_for", &GradientTable::frozen_for, py::arg("steps"), "Parameters frozen in so many steps in a row.")
      .def(
          "arm", &GradientTable::arm, py::arg("task"), py::arg("special"), py::arg("scale"),
          "Gradients of all parameters but the special ones, made by this backward pass, are multiplied by `scale` and "
          "sent without Python. The views of those that do not exist yet.")
      .def("disarm", &GradientTable::disarm)
      .def_property_readonly("sent_count", &GradientTable::sent_count)
      .def("take_norms", &GradientTable::take_norms, "Of what was sent since the last call, by index.")
      .def(
          "place", py::overload_cast<size_t, double, bool>(&GradientTable::place), py::arg("index"), py::arg("scale"),
          py::arg("is_apart"), py::call_guard<py::gil_scoped_release>(),
          "Writes the .grad of a parameter, times `scale`, into its view, and sends it; `is_apart`: .grad itself stays "
          "as it is. False if the engine refuses that.")
      .def("with_gradient", &GradientTable::with_gradient, "Parameters that have a gradient.")
      .def("fingerprint", &GradientTable::fingerprint, "Another number when parameters in host memory have changed.");
}

// Wrong arguments raise gradcast.UsageError in Python, like everything else that gradcast refuses.
void raise_in_python(const std::invalid_argument& error) {
  const py::object error_class = py::module_::import("gradcast.errors").attr("Error");
  const py::object exception = error_class(error.what(), "invalid_use");
  PyErr_SetObject(py::type::of(exception).ptr(), exception.ptr());
}

}  // namespace

}  // namespace gradcast

PYBIND11_MODULE(_c10d, module) {
  using gradcast::C10dTransport;
  // For calls that take locks: the engine's thread may hold them while torch's profiling tools, written in Python, need
  // the GIL.
  using WithoutGil = py::call_guard<py::gil_scoped_release>;
  module.doc() =
      "The part of gradcast that is compiled for one version of torch: a transport over torch.distributed, "
      "messages between ranks, DDP's buckets, hooks that send gradients, and who else holds a tensor.";
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const std::invalid_argument& error) {
      gradcast::raise_in_python(error);
    }
  });
  module.def("gather", &gradcast::gather_bytes, py::arg("process_group"), py::arg("own"), py::arg("device"),
             "Every rank's bytes, in rank order. Collective.");
  py::class_<gradcast::Numbers>(module, "Numbers", "A number of each rank, under way beside blocks.")
      .def(py::init<int, at::Device>(), py::arg("world_size"), py::arg("device"), WithoutGil())
      .def("begin", &gradcast::Numbers::begin, py::arg("process_group"), py::arg("own"), WithoutGil(),
           "Sends this rank's. Collective.")
      .def("wait", &gradcast::Numbers::wait, WithoutGil(), "All of them, in rank order.");
  module.def("from_first", &gradcast::bytes_from_first, py::arg("process_group"), py::arg("own"), py::arg("device"),
             "Rank 0's bytes. Collective.");
  module.def("copy_from_first", &gradcast::copy_from_first, py::arg("process_group"), py::arg("tensors"), WithoutGil(),
             "Rank 0's values into these tensors of every rank, in pieces of a few MB. Collective.");
  module.def("connect", &gradcast::connect_for, py::arg("process_group"), py::arg("device"), py::arg("op"),
             py::arg("dtype"), py::arg("size_bytes"), py::arg("wire"), WithoutGil(),
             "Sends zeros as a block of this kind and size is sent on this device. Collective.");
  module.def("all_reduce", &gradcast::all_reduce, py::arg("process_group"), py::arg("tensor"), WithoutGil(),
             "Sums a contiguous tensor over the ranks, in place. Collective.");
  module.def("send", &gradcast::send, py::arg("process_group"), py::arg("tensor"), py::arg("peer"),
             py::arg("timeout_s"), WithoutGil(), "Sends a contiguous tensor to one rank, and waits until it has gone.");
  module.def("receive", &gradcast::receive, py::arg("process_group"), py::arg("tensor"), py::arg("peer"),
             py::arg("timeout_s"), WithoutGil(), "Receives a contiguous tensor from one rank, and waits for it.");
  module.def("average_bucket", &gradcast::average_bucket_in_python, py::arg("process_group"), py::arg("bucket"),
             py::arg("piece_bytes"), "Averages a bucket of DDP over the ranks, in pieces. The future of its tensor.");
  module.def("drop_results", &gradcast::drop_results, "Lets go of averaged buckets that nobody else holds any more.");
  module.def(
      "held_elsewhere", &gradcast::held_elsewhere, py::arg("tensors"), py::arg("python_references"),
      py::arg("are_gradients"),
      "Positions of the tensors that somebody else holds: in Python beyond the list and `python_references` more "
      "(None: not counted), in C++, or by their memory.");
  module.def("foreign_memory", &gradcast::foreign_memory, py::arg("tensors"),
             "Positions of tensors in host memory that torch has not allocated in its usual way.");
  module.def("any_view_held", &gradcast::any_view_held, py::arg("views"), py::arg("parameters"),
             "Whether somebody but the list holds a view that is not the .grad of its parameter.");
  module.def("entries_held", &gradcast::entries_held, py::arg("attributes"),
             "Ids of the keys of an optimizer's state whose entries somebody may read without asking the optimizer.");
  module.def("random_position", &gradcast::random_position,
             "Another value after each draw from the host's default generator of random numbers.");
  module.def(
      "operations_begun", &gradcast::operations_begun, py::arg("process_group"),
      "The number of operations that this rank has begun in the group. None: a backend of it does not count them.");
  gradcast::bind_tensor_lists(module);
  py::class_<C10dTransport, gradcast::SharedTransport>(module, "Transport",
                                                       "Carries blocks of these flat buffers over a process group that "
                                                       "nobody else uses; those of fp32 buffers in the `wire` "
                                                       "format (fp32, bf16, fp16, int8), and on two levels if "
                                                       "`host_of` tells each rank's host. On a device they run on "
                                                       "gradcast's stream (`on_current_stream`) or the "
                                                       "backend's, and the device's events time them if `times`. For "
                                                       "the engine: see `capsule`.")
      .def(py::init(&gradcast::make_transport), py::arg("process_group"), py::arg("buffers"), py::arg("wire") = "fp32",
           py::arg("host_of") = std::vector<int>{}, py::arg("on_current_stream") = false,
           py::arg("has_high_priority") = true, py::arg("times") = false)
      .def_property_readonly(
          "capsule", [](const py::object& self) { return gradcast::make_capsule(self.cast<C10dTransport&>(), self); })
      .def("expect", &C10dTransport::expect, py::arg("blocks"), WithoutGil(),
           "CUDA: these blocks, each (buffer, ranges), are written and started from now on. Nothing may be in flight.")
      .def("on_written", &C10dTransport::on_written, py::arg("buffer"), py::arg("lo_bytes"), py::arg("hi_bytes"),
           WithoutGil(), "CUDA: this thread's current stream has just been given the kernels that write these bytes.")
      .def("order_behind", &C10dTransport::order_behind, py::arg("places"), WithoutGil(),
           "CUDA: what this thread's current stream is given from now on runs behind the traffic of these places (of "
           "buffer, lo_bytes, hi_bytes), as far as the engine has called it queued.")
      .def("replace_buffer", &C10dTransport::replace_buffer, py::arg("buffer"), py::arg("tensor"), WithoutGil(),
           "Blocks of this buffer are carried from and into other memory from now on. Nothing may be in flight.")
      .def("set_groups", &gradcast::set_groups, py::arg("buffer"), py::arg("segments"), py::arg("residual"),
           WithoutGil(),
           "For int8: the segments of an fp32 buffer, each (first element, element count, is exact, first owner), and "
           "the tensor of rounding errors.")
      .def("send_residual", &C10dTransport::send_residual, py::arg("buffer"), py::arg("first"), py::arg("sends"),
           WithoutGil(), "For int8: whether the rounding errors of the segment at this element are sent.");
  gradcast::bind_gradient_table(module);
}
