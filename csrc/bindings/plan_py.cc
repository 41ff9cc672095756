// Plans for Python: what they are, how they are made, what they cost, and the bounds below them.
#include <pybind11/operators.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "gradcast/bound.h"
#include "gradcast/plan.h"
#include "gradcast/play.h"
#include "gradcast/policy.h"

namespace py = pybind11;

namespace gradcast {
namespace {

const std::vector<std::string> kBlockFields = {"ranges", "op", "buffer", "reason", "start_ns", "finish_ns", "extra"};
const std::vector<std::string> kPlanFields = {"blocks",       "policy",   "mode",           "in_flight",
                                              "predicted_ns", "bound_ns", "plain_bound_ns", "extra"};

Block make_block(const std::vector<std::pair<int64_t, int64_t>>& ranges, const std::string& op, int32_t buffer,
                 std::string reason, double start_ns, double finish_ns, const py::dict& extra) {
  Block block{
      op_from_string(op), buffer, {}, start_ns, finish_ns, std::move(reason), extra_json_from(extra, kBlockFields)};
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

// A plan by hand has no predictions unless they are given: play() tells its time.
Plan make_hand_plan(std::vector<Block> blocks, std::string policy, const std::string& mode, int32_t in_flight,
                    double predicted_ns, double bound_ns, double plain_bound_ns, const py::dict& extra) {
  return {std::move(policy), mode_from_string(mode),
          in_flight,         std::move(blocks),
          predicted_ns,      bound_ns,
          plain_bound_ns,    extra_json_from(extra, kPlanFields)};
}

// From Python any plan may meet any profile, so play's precondition is checked here.
Timeline checked_play(const Profile& profile, const LinkModel& link, const Plan& plan) {
  check_plan(plan, profile);
  return play(profile, link, plan);
}

Bound bound_of(const Profile& profile, const LinkModel& link, const std::string& mode, int32_t in_flight, bool any_op) {
  return bound(profile, link, {mode_from_string(mode), in_flight, any_op});
}

Plan plan_with(const Profile& profile, const LinkModel& link, std::string policy, const std::string& mode,
               int32_t in_flight, std::map<std::string, double> parameters) {
  return make_plan(profile, link, {std::move(policy), mode_from_string(mode), in_flight, std::move(parameters)});
}

void bind_costs(py::module_& module) {
  def_record<BlockTimes>(module, "BlockTimes", "ready_ns", &BlockTimes::ready_ns, "launch_ns", &BlockTimes::launch_ns,
                         "finish_ns", &BlockTimes::finish_ns);
  def_record<TensorTimes>(module, "TensorTimes", "arrival_ns", &TensorTimes::arrival_ns, "read_ns",
                          &TensorTimes::read_ns, "wait_ns", &TensorTimes::wait_ns);
  auto timeline = def_record<Timeline>(module, "Timeline", "forward_start_ns", &Timeline::forward_start_ns,
                                       "iteration_ns", &Timeline::iteration_ns, "exposed_ns", &Timeline::exposed_ns,
                                       "host_ns", &Timeline::host_ns, "parts", &Timeline::parts);
  def_fields(timeline, "blocks", &Timeline::blocks, "tensors", &Timeline::tensors);
  module.def(
      "play", &checked_play, py::arg("profile"), py::arg("link"), py::arg("plan"), ReleaseGil(),
      "Returns the launch and finish of each block, the waits of forward, and the iteration time under the plan\n"
      "(ns from the start of backward). Raises gradcast.Error if the plan does not fit the profile or the link lacks\n"
      "one of its operations.");

  def_record<Bound>(module, "Bound", "plain_ns", &Bound::plain_ns, "best_ns", &Bound::best_ns, "exact", &Bound::exact);
  module.def(
      "bound", &bound_of, py::arg("profile"), py::arg("link"), py::kw_only(), py::arg("mode") = "overlap",
      py::arg("in_flight") = 1, py::arg("any_op") = false, ReleaseGil(),
      "Iteration times (ns) that no plan of this mode and in_flight can beat. any_op: over plans with every kind of\n"
      "operation that the link has, instead of plans of all-reduces alone.");
}

void bind_policies(py::module_& module) {
  def_record<PolicyParameter>(module, "PolicyParameter", "name", &PolicyParameter::name, "default_value",
                              &PolicyParameter::default_value, "meaning", &PolicyParameter::meaning);
  auto info = def_record<PolicyInfo>(module, "PolicyInfo", "name", &PolicyInfo::name, "summary", &PolicyInfo::summary);
  def_fields(info, "parameters", &PolicyInfo::parameters, "source", &PolicyInfo::source, "overlap_only",
             &PolicyInfo::overlap_only, "needs_scatter_gather", &PolicyInfo::needs_scatter_gather);

  module.attr("DEFAULT_POLICY") = std::string(kDefaultPolicy);
  module.def(
      "policies", [] { return py::tuple(py::cast(policies())); },
      "Every policy with its source and parameters, the default one first.");
  module.def(
      "make_plan", &plan_with, py::arg("profile"), py::arg("link"), py::kw_only(),
      py::arg("policy") = std::string(kDefaultPolicy), py::arg("mode") = "overlap", py::arg("in_flight") = 1,
      py::arg("parameters") = std::map<std::string, double>{}, ReleaseGil(),
      "Plans one iteration of the profile on the link. Returns a checked plan with its predicted time and bounds\n"
      "(ns from the start of backward to the end of the next forward).\n\n"
      "mode: \"overlap\" (gradients are also sent during the next forward) or \"hook\" (all arrive before it).\n"
      "in_flight: blocks between launch and finish at the same time. parameters: of the policy, by name; see\n"
      "policies(). Raises gradcast.Error.");
}

}  // namespace

void bind_plan(py::module_& module) {
  py::class_<Block> block(module, "Block");
  block
      .def(py::init(&make_block), py::kw_only(), py::arg("ranges"), py::arg("op") = "all_reduce", py::arg("buffer") = 0,
           py::arg("reason") = "", py::arg("start_ns") = 0.0, py::arg("finish_ns") = 0.0, py::arg("extra") = py::dict())
      .def_property_readonly("extra", [](const Block& self) { return extra_of(self.extra_json); })
      .def_property_readonly("op", [](const Block& block) { return to_string(block.op); })
      .def_property_readonly("ranges", &ranges_of)
      .def_property_readonly("size_bytes", &Block::size_bytes)
      .def(py::self == py::self);
  def_fields(block, "buffer", &Block::buffer, "start_ns", &Block::start_ns, "finish_ns", &Block::finish_ns, "reason",
             &Block::reason);
  def_replace(block, kBlockFields);
  def_repr(block, {"op", "buffer", "ranges", "start_ns", "finish_ns", "reason"});

  py::class_<Plan> plan(module, "Plan");
  def_fields(plan, "policy", &Plan::policy, "in_flight", &Plan::in_flight, "predicted_ns", &Plan::predicted_ns,
             "bound_ns", &Plan::bound_ns, "plain_bound_ns", &Plan::plain_bound_ns, "blocks", &Plan::blocks);
  def_replace(plan, kPlanFields);
  def_repr(plan, {"policy", "mode", "in_flight", "predicted_ns", "bound_ns", "blocks"});
  plan.def(py::init(&make_hand_plan), py::kw_only(), py::arg("blocks"), py::arg("policy") = "by hand",
           py::arg("mode") = "overlap", py::arg("in_flight") = 1, py::arg("predicted_ns") = 0.0,
           py::arg("bound_ns") = 0.0, py::arg("plain_bound_ns") = 0.0, py::arg("extra") = py::dict())
      .def_property_readonly("extra", [](const Plan& self) { return extra_of(self.extra_json); })
      .def_property_readonly("mode", [](const Plan& self) { return to_string(self.mode); })
      .def_static("from_json", &plan_from_json, py::arg("text"), ReleaseGil())
      .def(
          "to_json", [](const Plan& self) { return to_json(self); }, ReleaseGil())
      .def("check", &check_plan, py::arg("profile"), ReleaseGil())
      .def("hash", &hash_plan, py::arg("profile"), ReleaseGil())
      .def(py::self == py::self);

  bind_costs(module);
  bind_policies(module);
}

}  // namespace gradcast
