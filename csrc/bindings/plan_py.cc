// Plans for Python.
#include <pybind11/operators.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "gradcast/plan.h"

namespace py = pybind11;

namespace gradcast {
namespace {

Block make_block(const std::vector<std::pair<int64_t, int64_t>>& ranges, const std::string& op, int32_t buffer,
                 std::string reason) {
  Block block;
  block.op = op_from_string(op);
  block.buffer = buffer;
  block.reason = std::move(reason);
  for (const auto& [lo_bytes, hi_bytes] : ranges) {
    block.ranges.push_back({lo_bytes, hi_bytes});
  }
  return block;
}

py::tuple ranges_of(const Block& block) {
  py::tuple result(block.ranges.size());
  for (size_t i = 0; i < block.ranges.size(); ++i) {
    result[i] = py::make_tuple(block.ranges[i].lo_bytes, block.ranges[i].hi_bytes);
  }
  return result;
}

// A plan by hand, without predictions: play() tells its time.
Plan make_hand_plan(std::vector<Block> blocks, std::string policy, const std::string& mode, int32_t in_flight) {
  Plan plan;
  plan.policy = std::move(policy);
  plan.mode = mode_from_string(mode);
  plan.in_flight = in_flight;
  plan.blocks = std::move(blocks);
  return plan;
}

}  // namespace

void bind_plan(py::module_& module) {
  py::class_<Block> block(module, "Block");
  block
      .def(py::init(&make_block), py::kw_only(), py::arg("ranges"), py::arg("op") = "all_reduce", py::arg("buffer") = 0,
           py::arg("reason") = "")
      .def_property_readonly("op", [](const Block& block) { return to_string(block.op); })
      .def_readonly("buffer", &Block::buffer)
      .def_property_readonly("ranges", &ranges_of)
      .def_property_readonly("size_bytes", &Block::size_bytes)
      .def_readonly("start_ns", &Block::start_ns)
      .def_readonly("finish_ns", &Block::finish_ns)
      .def_readonly("reason", &Block::reason)
      .def(py::self == py::self);
  def_repr(block, {"op", "buffer", "ranges", "start_ns", "finish_ns", "reason"});

  py::class_<Plan> plan(module, "Plan");
  def_tuple(plan, "blocks", &Plan::blocks);
  def_repr(plan, {"policy", "mode", "in_flight", "predicted_ns", "bound_ns", "blocks"});
  plan.def(py::init(&make_hand_plan), py::kw_only(), py::arg("blocks"), py::arg("policy") = "by hand",
           py::arg("mode") = "overlap", py::arg("in_flight") = 1)
      .def_readonly("policy", &Plan::policy)
      .def_property_readonly("mode", [](const Plan& self) { return to_string(self.mode); })
      .def_readonly("in_flight", &Plan::in_flight)
      .def_readonly("predicted_ns", &Plan::predicted_ns)
      .def_readonly("bound_ns", &Plan::bound_ns)
      .def_readonly("plain_bound_ns", &Plan::plain_bound_ns)
      .def_static("from_json", &plan_from_json, py::arg("text"), ReleaseGil())
      .def(
          "to_json", [](const Plan& self) { return to_json(self); }, ReleaseGil())
      .def("check", &check_plan, py::arg("profile"), ReleaseGil())
      .def("hash", &hash_plan, py::arg("profile"), ReleaseGil())
      .def(py::self == py::self);
}

}  // namespace gradcast
