// Profiles for Python.
#include <pybind11/operators.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "gradcast/error.h"
#include "gradcast/profile.h"

namespace py = pybind11;

namespace gradcast {
namespace {

const std::vector<std::string> kTensorFields = {"name",      "bytes",  "ready_ns",      "need_ns",
                                                "update_ns", "buffer", "element_bytes", "extra"};
const std::vector<std::string> kProfileFields = {"name",         "forward_ns",    "backward_ns", "tensors",
                                                 "world_size",   "link",          "part_ns",     "host_step_ns",
                                                 "host_part_ns", "host_block_ns", "extra"};

Tensor make_tensor(std::string name, int64_t bytes, double ready_ns, double need_ns, double update_ns, int32_t buffer,
                   int32_t element_bytes, const py::dict& extra) {
  return {std::move(name), bytes,   buffer,    element_bytes,
          ready_ns,        need_ns, update_ns, extra_json_from(extra, kTensorFields)};
}

// A profile that exists in Python is a checked one, in urgency order.
Profile make_profile(std::string name, double forward_ns, double backward_ns, std::vector<Tensor> tensors,
                     int32_t world_size, std::optional<LinkModel> link, double part_ns, double host_step_ns,
                     double host_part_ns, double host_block_ns, const py::dict& extra) {
  Profile profile{std::move(name),
                  world_size,
                  forward_ns,
                  backward_ns,
                  std::move(tensors),
                  link.value_or(LinkModel{}),
                  part_ns,
                  host_step_ns,
                  host_part_ns,
                  host_block_ns,
                  extra_json_from(extra, kProfileFields)};
  sort_by_urgency(profile);
  check_profile(profile);
  return profile;
}

std::optional<LinkModel> link_of(const Profile& profile) {
  return profile.link.all_reduce.available() ? std::optional(profile.link) : std::nullopt;
}

Profile from_layer_table(const std::string& csv, std::string name, double scale, int32_t world_size) {
  return profile_from_layer_table(csv, {std::move(name), scale, world_size});
}

}  // namespace

py::dict extra_of(const std::string& extra_json) {
  return extra_json.empty() ? py::dict() : py::dict(py::module_::import("json").attr("loads")(extra_json));
}

// In the core's own form, so that an object equals the one that is read from its JSON.
std::string extra_json_from(const py::dict& extra, const std::vector<std::string>& known) {
  if (extra.empty()) return "";
  for (const auto& entry : extra) {
    const std::string name = entry.first.cast<std::string>();
    if (name == "version" || std::ranges::find(known, name) != known.end()) {
      throw Error(ErrorCode::kInvalidOption, "extra has " + name + ", a field that gradcast knows; rename yours");
    }
  }
  const py::object text =
      py::module_::import("json").attr("dumps")(extra, py::arg("separators") = py::make_tuple(",", ":"),
                                                py::arg("ensure_ascii") = false, py::arg("allow_nan") = false);
  return text.cast<std::string>();
}

void bind_profile(py::module_& module) {
  auto tensor = def_record<Tensor>(module, "Tensor", "name", &Tensor::name, "bytes", &Tensor::bytes, "ready_ns",
                                   &Tensor::ready_ns, "need_ns", &Tensor::need_ns, "update_ns", &Tensor::update_ns,
                                   "buffer", &Tensor::buffer, "element_bytes", &Tensor::element_bytes);
  tensor
      .def(py::init(&make_tensor), py::kw_only(), py::arg("name"), py::arg("bytes"), py::arg("ready_ns"),
           py::arg("need_ns"), py::arg("update_ns") = 0.0, py::arg("buffer") = 0, py::arg("element_bytes") = 4,
           py::arg("extra") = py::dict())
      .def_property_readonly("extra", [](const Tensor& self) { return extra_of(self.extra_json); })
      .def(py::self == py::self);
  def_replace(tensor, kTensorFields);

  auto profile = def_record<Profile>(
      module, "Profile", "name", &Profile::name, "world_size", &Profile::world_size, "forward_ns", &Profile::forward_ns,
      "backward_ns", &Profile::backward_ns, "tensors", &Profile::tensors, "part_ns", &Profile::part_ns, "host_step_ns",
      &Profile::host_step_ns, "host_part_ns", &Profile::host_part_ns, "host_block_ns", &Profile::host_block_ns);
  profile
      .def(py::init(&make_profile), py::kw_only(), py::arg("name"), py::arg("forward_ns"), py::arg("backward_ns"),
           py::arg("tensors"), py::arg("world_size") = 1, py::arg("link") = py::none(), py::arg("part_ns") = 0.0,
           py::arg("host_step_ns") = 0.0, py::arg("host_part_ns") = 0.0, py::arg("host_block_ns") = 0.0,
           py::arg("extra") = py::dict())
      .def_property_readonly("link", &link_of)
      .def_property_readonly("extra", [](const Profile& self) { return extra_of(self.extra_json); })
      .def_static("from_json", &profile_from_json, py::arg("text"), ReleaseGil())
      .def_static("from_layer_table", &from_layer_table, py::kw_only(), py::arg("csv"), py::arg("name") = "profile",
                  py::arg("scale") = 1.0, py::arg("world_size") = 1)
      .def(
          "to_json", [](const Profile& self) { return to_json(self); }, ReleaseGil())
      .def(py::self == py::self);
  def_replace(profile, kProfileFields);
}

}  // namespace gradcast
