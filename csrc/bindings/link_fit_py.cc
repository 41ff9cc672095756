// Fits of measured costs for Python.
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "gradcast/error.h"
#include "gradcast/link_fit.h"

namespace py = pybind11;

namespace gradcast {
namespace {

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

}  // namespace

void bind_link_fit(py::module_& module) {
  py::class_<LinkFit> link_fit(module, "LinkFit");
  link_fit.def_readonly("cost", &LinkFit::cost)
      .def_readonly("relative_error_median", &LinkFit::relative_error_median)
      .def_readonly("relative_error_max", &LinkFit::relative_error_max);
  def_repr(link_fit, {"cost", "relative_error_median", "relative_error_max"});

  module.def("fit_op_cost", &fit, py::arg("samples"), py::kw_only(), py::arg("method") = "robust",
             py::arg("max_pieces") = LinkFitOptions{}.max_pieces, ReleaseGil());
}

}  // namespace gradcast
