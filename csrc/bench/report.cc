#include "bench/report.h"

#include <cstdarg>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <utility>

#include "gradcast/version.h"
#include "parts.h"
#include "transport/common/host_memory.h"

namespace gradcast {
namespace {

[[gnu::format(printf, 1, 2)]] std::string line(const char* format, ...) {
  char text[256];
  va_list values;
  va_start(values, format);
  std::vsnprintf(text, sizeof text, format, values);
  va_end(values);
  return std::string(text) + "\n";
}

std::string name_of(Op op) {
  return std::string(to_string(op));
}

// As nccl-tests names it.
const char* type_of(Element element) {
  return element == Element::kBFloat16 ? "bfloat16" : element == Element::kFloat32 ? "float" : "double";
}

std::string fit_text(Op op, const LinkFit& fit) {
  std::string text = name_of(op) + " costs";
  for (const LinkPiece& piece : fit.cost.pieces) {
    char part[160];
    std::snprintf(part, sizeof part, " %.1f us + %.4f ns per byte", piece.alpha_ns / 1e3, piece.beta_ns_per_byte);
    text += part;
    text += piece.up_to_bytes == kUnboundedBytes ? "" : " up to " + bytes_text(piece.up_to_bytes) + ", then";
  }
  char error[96];
  std::snprintf(error, sizeof error, "; off by %.1f %% in the median, %.1f %% at most", 100 * fit.relative_error_median,
                100 * fit.relative_error_max);
  return text + error + "\n";
}

}  // namespace

std::string title(const BenchOptions& options, const BenchResults& results) {
  return "gradcast-bench " GRADCAST_VERSION ": " + std::to_string(results.world_size) + " ranks over " +
         options.transport + "\n" + places_text(results.places) + "\n";
}

std::string sweep_header(bool has_stream) {
  const char* const format = "%12s %12s %8s %6s %14s %5s %11s %9s %9s %7s %11s %11s %11s%s";
  return line(format, "size", "count", "type", "redop", "operation", "place", "time", "algbw", "busbw", "errors", "p50",
              "p90", "p99", has_stream ? "      stream" : "") +
         line(format, "(B)", "(elements)", "", "", "", "", "(us)", "(GB/s)", "(GB/s)", "", "(us)", "(us)", "(us)",
              has_stream ? "        (us)" : "");
}

std::string sweep_line(const SweepRow& row, int32_t world_size) {
  char stream[24] = "";
  if (row.stream_ns) std::snprintf(stream, sizeof stream, " %11.1f", *row.stream_ns / 1e3);
  return line("%12lld %12lld %8s %6s %14s %5s %11.1f %9.3f %9.3f %7lld %11.1f %11.1f %11.1f%s",
              static_cast<long long>(row.size_bytes),
              static_cast<long long>(row.size_bytes / element_bytes(row.element)), type_of(row.element),
              row.op == Op::kAllGather ? "none" : "sum", name_of(row.op).c_str(), row.in_place ? "in" : "out",
              row.time_ns / 1e3, row.algorithm_bandwidth(), row.bus_bandwidth(world_size),
              static_cast<long long>(row.error_count), row.p50_ns / 1e3, row.p90_ns / 1e3, row.p99_ns / 1e3, stream);
}

std::string fits_text(const BenchResults& results) {
  std::string text;
  for (const auto& [op, fit] : results.fits) {
    text += fit_text(op, fit);
  }
  return text;
}

std::string schedule_table(const BenchResults& results) {
  std::string text = line("%-14s %7s %9s %19s %9s %9s %9s %8s", "policy", "blocks", "step", "(lowest, highest)",
                          "exposed", "predicted", "bound", "/ bound");
  for (const ScheduleRow& row : results.schedule) {
    char spread[48];
    std::snprintf(spread, sizeof spread, "(%.1f, %.1f)", row.low_ns / 1e6, row.high_ns / 1e6);
    text +=
        line("%-14s %7d %9.1f %19s %9.1f %9.1f %9.1f %8.3f", row.policy.c_str(), row.block_count, row.step_ns / 1e6,
             spread, row.exposed_ns() / 1e6, row.predicted_ns / 1e6, row.bound_ns / 1e6, row.step_ns / row.bound_ns);
  }
  return text + "ms per step of " + results.profile + "; compute is played by waiting\n";
}

std::string overhead_table(const BenchResults& results) {
  return line("The engine costs %.2f us per block, and %.2f us of the caller per gradient.",
              results.overhead->block_ns / 1e3, results.overhead->ready_ns / 1e3);
}

std::string parts_json() {
  return nlohmann::ordered_json{{"MPI", kMpiState}, {"CUDA", kCudaState}, {"NCCL", kNcclState}}.dump(1) + "\n";
}

std::string to_json(const BenchOptions& options, const BenchResults& results) {
  nlohmann::ordered_json json = {{"version", 1},
                                 {"kind", "gradcast-bench"},
                                 {"gradcast", GRADCAST_VERSION},
                                 {"transport", options.transport},
                                 {"world_size", results.world_size}};
  for (const Place& place : results.places) {
    json["ranks"].push_back({{"host", place.host},
                             {"device", place.device},
                             {"libraries", place.libraries},
                             {"environment", place.environment}});
  }
  for (const SweepRow& row : results.sweep) {
    nlohmann::ordered_json fields = {{"op", name_of(row.op)},
                                     {"dtype", to_string(row.element)},
                                     {"in_place", row.in_place},
                                     {"size_bytes", row.size_bytes},
                                     {"time_ns", row.time_ns},
                                     {"low_ns", row.low_ns},
                                     {"high_ns", row.high_ns},
                                     {"p50_ns", row.p50_ns},
                                     {"p90_ns", row.p90_ns},
                                     {"p99_ns", row.p99_ns},
                                     {"algbw_gb_per_s", row.algorithm_bandwidth()},
                                     {"busbw_gb_per_s", row.bus_bandwidth(results.world_size)},
                                     {"errors", row.error_count}};
    if (row.stream_ns) fields["stream_ns"] = *row.stream_ns;
    json["sweep"].push_back(std::move(fields));
  }
  for (const auto& [op, fit] : results.fits) {
    json["fit"][name_of(op)] = {{"relative_error_median", fit.relative_error_median},
                                {"relative_error_max", fit.relative_error_max}};
  }
  if (!results.fits.empty()) {
    json["link"] = nlohmann::ordered_json::parse(to_json(results.link));
  }
  for (const ScheduleRow& row : results.schedule) {
    json["schedule"].push_back({{"policy", row.policy},
                                {"blocks", row.block_count},
                                {"step_ns", row.step_ns},
                                {"low_ns", row.low_ns},
                                {"high_ns", row.high_ns},
                                {"compute_ns", row.compute_ns},
                                {"exposed_ns", row.exposed_ns()},
                                {"predicted_ns", row.predicted_ns},
                                {"prediction_error", row.prediction_error()},
                                {"bound_ns", row.bound_ns}});
  }
  if (!results.schedule.empty()) {
    json["profile"] = results.profile;
    json["mode"] = std::string(to_string(options.schedule.mode));
  }
  if (results.overhead) {
    json["overhead"] = {{"block_ns", results.overhead->block_ns}, {"ready_ns", results.overhead->ready_ns}};
  }
  return json.dump(1) + "\n";
}

}  // namespace gradcast
