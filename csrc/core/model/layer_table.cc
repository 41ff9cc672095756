// A profile from a CSV table of layers, the form in which layer times are published.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "gradcast/error.h"
#include "gradcast/profile.h"
#include "model/shown.h"

namespace gradcast {
namespace {

constexpr double kNsPerMs = 1e6;

struct Row {
  size_t line = 0;  // where it begins, for messages
  std::vector<std::string> cells;
};

[[noreturn]] void refuse(size_t line, const std::string& message) {
  throw Error(ErrorCode::kInvalidProfile, "line " + std::to_string(line) + ": " + message);
}

std::string trimmed(const std::string& cell) {
  const size_t first = cell.find_first_not_of(" \t");
  return first == std::string::npos ? "" : cell.substr(first, cell.find_last_not_of(" \t") + 1 - first);
}

// RFC 4180: cells may be quoted, quotes inside are doubled, a quoted cell may hold commas and line breaks.
std::vector<Row> rows_of(std::string_view csv) {
  constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";  // spreadsheets write one
  if (csv.starts_with(kByteOrderMark)) {
    csv.remove_prefix(kByteOrderMark.size());
  }
  std::vector<Row> rows;
  size_t line = 1;
  size_t at = 0;
  while (at < csv.size()) {
    Row row{line, {""}};
    bool quoted = false;
    for (; at < csv.size() && (quoted || csv[at] != '\n'); ++at) {
      const char c = csv[at];
      line += c == '\n';
      if (c == '"' && quoted && at + 1 < csv.size() && csv[at + 1] == '"') {
        row.cells.back() += '"';
        ++at;
      } else if (c == '"') {
        quoted = !quoted;
      } else if (c == ',' && !quoted) {
        row.cells.emplace_back();
      } else if (c != '\r' || quoted) {
        row.cells.back() += c;
      }
    }
    if (quoted) {
      refuse(row.line, "a quoted cell does not end; is the file truncated?");
    }
    ++at;
    ++line;
    std::transform(row.cells.begin(), row.cells.end(), row.cells.begin(), trimmed);
    if (row.cells.size() > 1 || !row.cells[0].empty()) {
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

size_t column_of(const Row& header, std::string_view name) {
  const auto at = std::find(header.cells.begin(), header.cells.end(), name);
  if (at == header.cells.end()) {
    const bool other_separator = header.cells.size() == 1 && header.cells[0].find(';') != std::string::npos;
    refuse(header.line, "the column " + std::string(name) + " is missing; " +
                            (other_separator ? "cells are separated by commas, not by semicolons"
                                             : "a layer table has layer, forward_ms, backward_ms and parameter_bytes"));
  }
  return static_cast<size_t>(at - header.cells.begin());
}

double number_in(const Row& row, size_t column, std::string_view name) {
  const std::string& cell = row.cells[column];
  double value = 0;
  const auto [end, error] = std::from_chars(cell.data(), cell.data() + cell.size(), value);
  if (error != std::errc() || end != cell.data() + cell.size() || !std::isfinite(value) || value < 0) {
    refuse(row.line, std::string(name) + " is " + shown(cell) + "; a number of at least 0 is expected");
  }
  return value;
}

struct Layer {
  std::string name;
  double forward_ns;
  double backward_ns;
  int64_t parameter_bytes;
};

std::vector<Layer> layers_of(std::string_view csv, double scale) {
  const std::vector<Row> rows = rows_of(csv);
  if (rows.size() < 2) {
    throw Error(ErrorCode::kInvalidProfile,
                "the layer table has no layers; a header and at least one line are expected");
  }
  const size_t name = column_of(rows[0], "layer");
  const size_t forward = column_of(rows[0], "forward_ms");
  const size_t backward = column_of(rows[0], "backward_ms");
  const size_t bytes = column_of(rows[0], "parameter_bytes");
  std::vector<Layer> layers;
  for (size_t r = 1; r < rows.size(); ++r) {
    const Row& row = rows[r];
    if (row.cells.size() != rows[0].cells.size()) {
      refuse(row.line,
             std::to_string(row.cells.size()) + " cells where the header has " + std::to_string(rows[0].cells.size()));
    }
    const double parameter_bytes = number_in(row, bytes, "parameter_bytes");
    if (parameter_bytes != std::floor(parameter_bytes) || parameter_bytes >= static_cast<double>(kBytesMax)) {
      refuse(row.line, "parameter_bytes is " + shown(row.cells[bytes]) + "; a whole number below 2^53 is expected");
    }
    layers.push_back({row.cells[name], number_in(row, forward, "forward_ms") * scale * kNsPerMs,
                      number_in(row, backward, "backward_ms") * scale * kNsPerMs,
                      static_cast<int64_t>(parameter_bytes)});
  }
  return layers;
}

// Tables do not say how large an element is: the largest of 4, 2 and 1 bytes that divides every layer.
int32_t element_bytes_of(const std::vector<Layer>& layers) {
  int32_t element_bytes = 4;
  for (const Layer& layer : layers) {
    while (layer.parameter_bytes % element_bytes != 0) {
      element_bytes /= 2;
    }
  }
  return element_bytes;
}

// Tables name layers by what they compute, which several may do; plans name tensors.
std::string name_of_its_own(const std::string& layer, std::set<std::string>& names) {
  std::string name = layer;
  for (int number = 2; !names.insert(name).second; ++number) {
    name = layer + " #" + std::to_string(number);
  }
  return name;
}

}  // namespace

Profile profile_from_layer_table(std::string_view csv, const LayerTableOptions& options) {
  if (!std::isfinite(options.scale) || options.scale <= 0) {
    throw Error(ErrorCode::kInvalidOption, "scale is " + std::to_string(options.scale) + "; it must be above 0");
  }
  const std::vector<Layer> layers = layers_of(csv, options.scale);
  const int32_t element_bytes = element_bytes_of(layers);
  Profile profile;
  profile.name = options.name;
  profile.world_size = options.world_size;
  double backward_ns = 0;
  for (const Layer& layer : layers) {
    backward_ns += layer.backward_ns;
  }
  // Backward visits the layers from the last to the first: a layer is ready when it and all behind it have run.
  double forward_ns = 0;
  double ready_ns = backward_ns;
  std::set<std::string> names;
  for (const Layer& layer : layers) {
    if (layer.parameter_bytes > 0) {
      profile.tensors.push_back({.name = name_of_its_own(layer.name, names),
                                 .bytes = layer.parameter_bytes,
                                 .element_bytes = element_bytes,
                                 .ready_ns = std::max(0.0, std::round(ready_ns)),
                                 .need_ns = std::round(forward_ns)});
    }
    ready_ns -= layer.backward_ns;
    forward_ns += layer.forward_ns;
  }
  if (profile.tensors.empty()) {
    throw Error(ErrorCode::kInvalidProfile,
                "no layer of the table has parameter_bytes above 0; there is nothing to send");
  }
  profile.forward_ns = std::round(forward_ns);
  profile.backward_ns = std::round(backward_ns);
  check_profile(profile);
  sort_by_urgency(profile);
  return profile;
}

}  // namespace gradcast
