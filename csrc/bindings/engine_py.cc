// The engine for Python.
//
// No call holds the GIL while it waits, and none that is hot gives it back: on_ready costs less than giving it back
// would.
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/capsule.h"
#include "gradcast/engine.h"
#include "gradcast/gradient_sink.h"

namespace py = pybind11;

namespace gradcast {
namespace {

struct TransportOwner {
  py::object transport;
};

// An engine and the Python object that its transport lives in, which is released after it.
class BoundEngine : private TransportOwner, public Engine, public GradientSink {
 public:
  BoundEngine(py::object owner, std::string thread_name, int32_t timeline_iterations, int32_t queue_window)
      : TransportOwner{std::move(owner)},
        Engine(transport_of(transport), EngineOptions{std::move(thread_name), timeline_iterations, queue_window}) {}
  ~BoundEngine() { shutdown(); }

  bool ready(int32_t tensor) noexcept override {
    try {
      on_ready(tensor);
      return true;
    } catch (...) {
      return false;
    }
  }

  // Ending a thread takes a moment, and whoever that thread waits for may need the GIL.
  void shutdown() {
    {
      const py::gil_scoped_release released;
      Engine::shutdown();
    }
    transport = py::none();
  }
};

// Tensors that have arrived already, the usual case, are answered without releasing the GIL: other Python threads would
// take it and keep it for milliseconds.
template <typename Wait>
bool wait_without_gil(int64_t timeout_ns, const Wait& wait) {
  if (wait(int64_t{0})) {
    return true;
  }
  if (timeout_ns == 0) {
    return false;
  }
  const py::gil_scoped_release released;
  return wait(timeout_ns);
}

Progress until(bool queued) {
  return queued ? Progress::kQueued : Progress::kArrived;
}

bool wait(BoundEngine& engine, const std::vector<int32_t>& tensors, int64_t timeout_ns, bool queued) {
  return wait_without_gil(timeout_ns, [&](int64_t time_ns) { return engine.wait(tensors, time_ns, until(queued)); });
}

bool wait_all(BoundEngine& engine, int64_t timeout_ns, bool queued) {
  return wait_without_gil(timeout_ns, [&](int64_t time_ns) { return engine.wait_all(time_ns, until(queued)); });
}

py::object sink_of(const py::object& engine) {
  GradientSink& sink = engine.cast<BoundEngine&>();
  return make_capsule(&sink, kGradientSinkCapsule, engine);
}

void bind_records(py::module_& module) {
  def_record<BlockRecord>(module, "BlockRecord", "ready_ns", &BlockRecord::ready_ns, "due_ns", &BlockRecord::due_ns,
                          "launch_ns", &BlockRecord::launch_ns, "finish_ns", &BlockRecord::finish_ns, "device_ns",
                          &BlockRecord::device_ns);
  def_record<IterationRecord>(module, "IterationRecord", "iteration", &IterationRecord::iteration, "plan_version",
                              &IterationRecord::plan_version, "ready_ns", &IterationRecord::ready_ns, "blocks",
                              &IterationRecord::blocks);
  def_record<EngineCounters>(module, "EngineCounters", "iterations", &EngineCounters::iterations, "blocks",
                             &EngineCounters::blocks, "bytes", &EngineCounters::bytes, "link_ns",
                             &EngineCounters::link_ns, "loop_ns", &EngineCounters::loop_ns, "record_bytes",
                             &EngineCounters::record_bytes);
}

}  // namespace

void bind_engine(py::module_& module) {
  bind_records(module);
  py::class_<BoundEngine>(module, "Engine")
      .def(py::init<py::object, std::string, int32_t, int32_t>(), py::arg("transport"), py::kw_only(),
           py::arg("thread_name") = EngineOptions{}.thread_name,
           py::arg("timeline_iterations") = EngineOptions{}.timeline_iterations,
           py::arg("queue_window") = EngineOptions{}.queue_window)
      .def("follow", &Engine::follow, py::arg("profile"), py::arg("plan"), ReleaseGil())
      .def("begin", &Engine::begin)
      .def("on_ready", &Engine::on_ready, py::arg("tensor"))
      .def_property_readonly("sink", &sink_of)
      .def("wait", &wait, py::arg("tensors"), py::arg("timeout_ns") = -1, py::kw_only(), py::arg("queued") = false)
      .def("wait_all", &wait_all, py::arg("timeout_ns") = -1, py::kw_only(), py::arg("queued") = false)
      .def(
          "queued_no_later_than",
          [](BoundEngine& engine, const std::vector<int32_t>& tensors, int64_t position) {
            return engine.queued_no_later_than(tensors, position);
          },
          py::arg("tensors"), py::arg("position") = 0)
      .def("arrivals", &Engine::arrivals, py::arg("position") = 0)
      .def_property_readonly("busy", &Engine::busy)
      .def("waiting_for", &Engine::waiting_for)
      .def("timeline", [](BoundEngine& engine) { return py::tuple(py::cast(engine.timeline())); })
      .def("counters", &Engine::counters)
      .def("shutdown", &BoundEngine::shutdown)
      .def_static("now_ns", &Engine::now_ns);
}

}  // namespace gradcast
