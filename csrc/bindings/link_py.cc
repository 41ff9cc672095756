// Link models, fits of measured costs, and derived and published networks for Python.
#include <pybind11/operators.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "gradcast/error.h"
#include "gradcast/link.h"
#include "gradcast/link_fit.h"
#include "gradcast/networks.h"
#include "gradcast/profile.h"

namespace py = pybind11;

namespace gradcast {
namespace {

LinkPiece make_piece(double alpha_ns, double beta_ns_per_byte, std::optional<int64_t> up_to_bytes) {
  return {up_to_bytes.value_or(kUnboundedBytes), alpha_ns, beta_ns_per_byte};
}

std::optional<int64_t> end_of(const LinkPiece& piece) {
  return piece.up_to_bytes == kUnboundedBytes ? std::nullopt : std::optional(piece.up_to_bytes);
}

LinkModel make_link(std::vector<LinkPiece> all_reduce, std::vector<LinkPiece> reduce_scatter,
                    std::vector<LinkPiece> all_gather, double pack_ns_per_byte) {
  LinkModel link{{std::move(all_reduce)}, {std::move(reduce_scatter)}, {std::move(all_gather)}, pack_ns_per_byte};
  check_link(link);
  return link;
}

// Asking an unavailable kind of operation what it costs is a question of the user, not a defect.
const OpCost& require(const OpCost& cost) {
  if (!cost.available()) {
    throw Error(ErrorCode::kInvalidLink, "the link has no cost for this kind of operation; add its pieces to the link");
  }
  return cost;
}

FitMethod method_from(const std::string& name) {
  if (name == "robust") return FitMethod::kRobust;
  if (name == "least_squares") return FitMethod::kLeastSquares;
  throw Error(ErrorCode::kInvalidOption, "there is no fit method " + name + "; there are robust and least_squares");
}

LinkFit fit(const std::vector<std::pair<int64_t, double>>& samples, const std::string& method, int32_t max_pieces) {
  std::vector<LinkSample> converted;
  converted.reserve(samples.size());
  for (const auto& [size_bytes, time_ns] : samples) {
    converted.push_back({size_bytes, time_ns});
  }
  return fit_op_cost(converted, {method_from(method), max_pieces});
}

void bind_networks(py::module_& module) {
  def_record<Hop>(module, "Hop", "latency_ns", &Hop::latency_ns, "bandwidth_bytes_per_s", &Hop::bandwidth_bytes_per_s)
      .def(py::init([](double latency_ns, double bandwidth_bytes_per_s) {
             return Hop{latency_ns, bandwidth_bytes_per_s};
           }),
           py::kw_only(), py::arg("latency_ns"), py::arg("bandwidth_bytes_per_s"));

  py::class_<NamedNetwork> named(module, "NamedNetwork");
  def_fields(named, "name", &NamedNetwork::name, "summary", &NamedNetwork::summary, "source", &NamedNetwork::source,
             "world_size", &NamedNetwork::world_size, "link", &NamedNetwork::link);
  def_repr(named, {"name", "summary", "world_size"});

  module.def("ring_link", &ring_link, py::arg("hop"), py::arg("worker_count"));
  module.def("tree_link", &tree_link, py::arg("hop"), py::arg("worker_count"));
  module.def(
      "hierarchical_link",
      [](const Hop& intra_node, const Hop& inter_node, int32_t node_count, int32_t workers_per_node) {
        return hierarchical_link({intra_node, inter_node, node_count, workers_per_node});
      },
      py::kw_only(), py::arg("intra_node"), py::arg("inter_node"), py::arg("node_count"), py::arg("workers_per_node"));
  module.def("networks", [] { return py::tuple(py::cast(networks())); });
  module.def("network", &network, py::arg("name"));
}

}  // namespace

void bind_link(py::module_& module) {
  py::class_<LinkPiece> piece(module, "LinkPiece");
  piece
      .def(py::init(&make_piece), py::kw_only(), py::arg("alpha_ns"), py::arg("beta_ns_per_byte"),
           py::arg("up_to_bytes") = py::none())
      .def_property_readonly("up_to_bytes", &end_of)
      .def(py::self == py::self);
  def_fields(piece, "alpha_ns", &LinkPiece::alpha_ns, "beta_ns_per_byte", &LinkPiece::beta_ns_per_byte);
  def_repr(piece, {"alpha_ns", "beta_ns_per_byte", "up_to_bytes"});

  def_record<OpCost>(module, "OpCost", "pieces", &OpCost::pieces)
      .def_property_readonly("available", &OpCost::available)
      .def(
          "cost_ns", [](const OpCost& cost, int64_t size_bytes) { return require(cost).cost_ns(size_bytes); },
          py::arg("size_bytes"))
      .def(
          "capacity_bytes",
          [](const OpCost& cost, double duration_ns) { return require(cost).capacity_bytes(duration_ns); },
          py::arg("duration_ns"))
      .def(py::self == py::self);

  def_record<LinkModel>(module, "LinkModel", "all_reduce", &LinkModel::all_reduce, "reduce_scatter",
                        &LinkModel::reduce_scatter, "all_gather", &LinkModel::all_gather, "pack_ns_per_byte",
                        &LinkModel::pack_ns_per_byte)
      .def(py::init(&make_link), py::kw_only(), py::arg("all_reduce"),
           py::arg("reduce_scatter") = std::vector<LinkPiece>{}, py::arg("all_gather") = std::vector<LinkPiece>{},
           py::arg("pack_ns_per_byte") = 0.0)
      .def("scaled", &scaled, py::arg("alpha_factor"), py::arg("beta_factor"))
      .def_static("from_json", &link_from_json, py::arg("text"))
      .def("to_json", [](const LinkModel& link) { return to_json(link); })
      .def(py::self == py::self);

  def_record<LinkFit>(module, "LinkFit", "cost", &LinkFit::cost, "relative_error_median",
                      &LinkFit::relative_error_median, "relative_error_max", &LinkFit::relative_error_max);
  module.def("fit_op_cost", &fit, py::arg("samples"), py::kw_only(), py::arg("method") = "robust",
             py::arg("max_pieces") = LinkFitOptions{}.max_pieces, ReleaseGil());
  bind_networks(module);
}

}  // namespace gradcast
