// play() for Python.
#include "bindings/bindings.h"
#include "gradcast/play.h"

namespace py = pybind11;

namespace gradcast {
namespace {

// From Python any plan may meet any profile, so play's precondition is checked here.
Timeline checked_play(const Profile& profile, const LinkModel& link, const Plan& plan) {
  check_plan(plan, profile);
  return play(profile, link, plan);
}

}  // namespace

void bind_play(py::module_& module) {
  py::class_<BlockTimes> block(module, "BlockTimes");
  block.def_readonly("ready_ns", &BlockTimes::ready_ns)
      .def_readonly("launch_ns", &BlockTimes::launch_ns)
      .def_readonly("finish_ns", &BlockTimes::finish_ns);
  def_repr(block, {"ready_ns", "launch_ns", "finish_ns"});

  py::class_<TensorTimes> tensor(module, "TensorTimes");
  tensor.def_readonly("arrival_ns", &TensorTimes::arrival_ns)
      .def_readonly("read_ns", &TensorTimes::read_ns)
      .def_readonly("wait_ns", &TensorTimes::wait_ns);
  def_repr(tensor, {"arrival_ns", "read_ns", "wait_ns"});

  py::class_<Timeline> timeline(module, "Timeline");
  def_tuple(timeline, "blocks", &Timeline::blocks);
  def_tuple(timeline, "tensors", &Timeline::tensors);
  def_repr(timeline, {"forward_start_ns", "iteration_ns", "exposed_ns"});
  timeline.def_readonly("forward_start_ns", &Timeline::forward_start_ns)
      .def_readonly("iteration_ns", &Timeline::iteration_ns)
      .def_readonly("exposed_ns", &Timeline::exposed_ns);

  module.def(
      "play", &checked_play, py::arg("profile"), py::arg("link"), py::arg("plan"), ReleaseGil(),
      "What happens when the plan is followed: when each block is launched and finished, when forward waits, and\n"
      "how long the iteration takes (ns from the start of backward). Raises gradcast.Error if the plan does not\n"
      "fit the profile or the link lacks one of its operations.");
}

}  // namespace gradcast
