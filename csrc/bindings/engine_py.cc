// The engine for Python.
//
// No call holds the GIL while it waits, and none that is hot gives it back: on_ready costs less than giving it back
// would.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/capsule.h"
#include "gradcast/engine.h"

namespace py = pybind11;

namespace gradcast {
namespace {

// An engine and the Python object that its transport lives in.
class BoundEngine {
 public:
  BoundEngine(py::object transport, std::string thread_name, int32_t timeline_iterations)
      : transport_(std::move(transport)),
        engine_(std::make_unique<Engine>(transport_of(transport_),
                                         EngineOptions{std::move(thread_name), timeline_iterations})) {}

  // Ending a thread takes a moment, and whoever that thread waits for may need the GIL.
  ~BoundEngine() {
    const py::gil_scoped_release released;
    engine_.reset();
  }

  void shutdown() {
    {
      const py::gil_scoped_release released;
      engine_->shutdown();
    }
    transport_ = py::none();
  }

  Engine& operator*() { return *engine_; }
  Engine* operator->() { return engine_.get(); }

 private:
  py::object transport_;  // released after the engine, which uses what it holds
  std::unique_ptr<Engine> engine_;
};

// What has arrived already is the usual case, and is answered without giving the GIL back: other Python threads would
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
  return wait_without_gil(timeout_ns, [&](int64_t time_ns) { return engine->wait(tensors, time_ns, until(queued)); });
}

bool wait_all(BoundEngine& engine, int64_t timeout_ns, bool queued) {
  return wait_without_gil(timeout_ns, [&](int64_t time_ns) { return engine->wait_all(time_ns, until(queued)); });
}

void bind_records(py::module_& module) {
  py::class_<BlockRecord> block(module, "BlockRecord");
  block.def_readonly("ready_ns", &BlockRecord::ready_ns)
      .def_readonly("due_ns", &BlockRecord::due_ns)
      .def_readonly("launch_ns", &BlockRecord::launch_ns)
      .def_readonly("finish_ns", &BlockRecord::finish_ns);
  def_repr(block, {"ready_ns", "due_ns", "launch_ns", "finish_ns"});

  py::class_<IterationRecord> iteration(module, "IterationRecord");
  iteration.def_readonly("iteration", &IterationRecord::iteration)
      .def_readonly("plan_version", &IterationRecord::plan_version);
  def_tuple(iteration, "ready_ns", &IterationRecord::ready_ns);
  def_tuple(iteration, "blocks", &IterationRecord::blocks);
  def_repr(iteration, {"iteration", "plan_version", "ready_ns", "blocks"});

  py::class_<EngineCounters> counters(module, "EngineCounters");
  counters.def_readonly("iterations", &EngineCounters::iterations)
      .def_readonly("blocks", &EngineCounters::blocks)
      .def_readonly("bytes", &EngineCounters::bytes)
      .def_readonly("link_ns", &EngineCounters::link_ns)
      .def_readonly("loop_ns", &EngineCounters::loop_ns)
      .def_readonly("record_bytes", &EngineCounters::record_bytes);
  def_repr(counters, {"iterations", "blocks", "bytes", "link_ns", "loop_ns", "record_bytes"});
}

}  // namespace

void bind_engine(py::module_& module) {
  bind_records(module);
  py::class_<BoundEngine>(module, "Engine")
      .def(py::init<py::object, std::string, int32_t>(), py::arg("transport"), py::kw_only(),
           py::arg("thread_name") = EngineOptions{}.thread_name,
           py::arg("timeline_iterations") = EngineOptions{}.timeline_iterations)
      .def(
          "follow",
          [](BoundEngine& engine, const Profile& profile, const Plan& plan) { return engine->follow(profile, plan); },
          py::arg("profile"), py::arg("plan"), ReleaseGil())
      .def("begin", [](BoundEngine& engine) { return engine->begin(); })
      .def(
          "on_ready", [](BoundEngine& engine, int32_t tensor) { engine->on_ready(tensor); }, py::arg("tensor"))
      .def("wait", &wait, py::arg("tensors"), py::arg("timeout_ns") = -1, py::kw_only(), py::arg("queued") = false)
      .def("wait_all", &wait_all, py::arg("timeout_ns") = -1, py::kw_only(), py::arg("queued") = false)
      .def(
          "queued_no_later_than",
          [](BoundEngine& engine, const std::vector<int32_t>& tensors) {
            return engine->queued_no_later_than(tensors);
          },
          py::arg("tensors"))
      .def(
          "arrivals", [](BoundEngine& engine, int64_t position) { return engine->arrivals(position); },
          py::arg("position") = 0)
      .def_property_readonly("busy", [](BoundEngine& engine) { return engine->busy(); })
      .def("waiting_for", [](BoundEngine& engine) { return engine->waiting_for(); })
      .def("timeline", [](BoundEngine& engine) { return py::tuple(py::cast(engine->timeline())); })
      .def("counters", [](BoundEngine& engine) { return engine->counters(); })
      .def("shutdown", &BoundEngine::shutdown)
      .def_static("now_ns", &Engine::now_ns);
}

}  // namespace gradcast
