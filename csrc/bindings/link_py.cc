// Link models for Python.
#include <pybind11/operators.h>

#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "gradcast/error.h"
#include "gradcast/link.h"
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
  LinkModel link;
  link.all_reduce.pieces = std::move(all_reduce);
  link.reduce_scatter.pieces = std::move(reduce_scatter);
  link.all_gather.pieces = std::move(all_gather);
  link.pack_ns_per_byte = pack_ns_per_byte;
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

}  // namespace

void bind_link(py::module_& module) {
  py::class_<LinkPiece> piece(module, "LinkPiece");
  piece
      .def(py::init(&make_piece), py::kw_only(), py::arg("alpha_ns"), py::arg("beta_ns_per_byte"),
           py::arg("up_to_bytes") = py::none())
      .def_property_readonly("up_to_bytes", &end_of)
      .def_readonly("alpha_ns", &LinkPiece::alpha_ns)
      .def_readonly("beta_ns_per_byte", &LinkPiece::beta_ns_per_byte)
      .def(py::self == py::self);
  def_repr(piece, {"alpha_ns", "beta_ns_per_byte", "up_to_bytes"});

  py::class_<OpCost> op_cost(module, "OpCost");
  def_tuple(op_cost, "pieces", &OpCost::pieces);
  def_repr(op_cost, {"pieces"});
  op_cost.def_property_readonly("available", &OpCost::available)
      .def(
          "cost_ns", [](const OpCost& cost, int64_t size_bytes) { return require(cost).cost_ns(size_bytes); },
          py::arg("size_bytes"))
      .def(
          "capacity_bytes",
          [](const OpCost& cost, double duration_ns) { return require(cost).capacity_bytes(duration_ns); },
          py::arg("duration_ns"))
      .def(py::self == py::self);

  py::class_<LinkModel> link(module, "LinkModel");
  link.def(py::init(&make_link), py::kw_only(), py::arg("all_reduce"),
           py::arg("reduce_scatter") = std::vector<LinkPiece>{}, py::arg("all_gather") = std::vector<LinkPiece>{},
           py::arg("pack_ns_per_byte") = 0.0)
      .def_readonly("all_reduce", &LinkModel::all_reduce)
      .def_readonly("reduce_scatter", &LinkModel::reduce_scatter)
      .def_readonly("all_gather", &LinkModel::all_gather)
      .def_readonly("pack_ns_per_byte", &LinkModel::pack_ns_per_byte)
      .def("scaled", &scaled, py::arg("alpha_factor"), py::arg("beta_factor"))
      .def_static(
          "from_json", [](const std::string& text) { return link_from_json(text); }, py::arg("text"))
      .def("to_json", [](const LinkModel& link) { return to_json(link); })
      .def(py::self == py::self);
  def_repr(link, {"all_reduce", "reduce_scatter", "all_gather", "pack_ns_per_byte"});
}

}  // namespace gradcast
