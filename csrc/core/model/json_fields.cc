#include "model/json_fields.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "gradcast/text.h"

namespace gradcast {
namespace {

// No file of ours nests deeper than 6; unknown fields may, but not so deep that writing them back could exhaust the
// stack.
constexpr int kDepthMax = 64;

std::string line_and_column(std::string_view text, size_t byte) {
  const std::string_view before = text.substr(0, std::min(byte, text.size()));
  const auto line = std::count(before.begin(), before.end(), '\n') + 1;
  const size_t line_start = before.rfind('\n');
  const size_t column = line_start == std::string_view::npos ? before.size() : before.size() - line_start - 1;
  return "line " + std::to_string(line) + ", column " + std::to_string(std::max<size_t>(column, 1));
}

std::string dump(const Json& value) {
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

// For messages: the value as the user wrote it, shortened.
std::string shown(const Json& value) {
  std::string text = dump(value);
  constexpr size_t kShownMax = 40;
  if (text.size() <= kShownMax) return text;
  size_t end = kShownMax;
  while ((static_cast<unsigned char>(text[end]) & 0xC0) == 0x80)  // not inside of a character
    --end;
  return text.substr(0, end) + "…";
}

}  // namespace

Json parse_json(std::string_view text, const char* what, ErrorCode code) {
  const auto limit_depth = [&](int depth, Json::parse_event_t, Json&) {
    if (depth > kDepthMax) {
      throw Error(code, std::string("the ") + what + " nests deeper than " + std::to_string(kDepthMax) + " levels");
    }
    return true;
  };
  try {
    return Json::parse(text, limit_depth);
  } catch (const Json::parse_error& error) {
    const std::string where = error.byte > text.size() ? "it ends too early (is the file truncated?)"
                                                       : "the error is at " + line_and_column(text, error.byte);
    throw Error(code, std::string("the ") + what + " is not valid JSON: " + where +
                          "; note that JSON has no NaN and no Infinity");
  } catch (const Json::out_of_range&) {
    throw Error(code, std::string("the ") + what + " has a number too large for a double");
  }
}

Fields::Fields(const Json& object, std::string path, ErrorCode code)
    : object_(&object), path_(std::move(path)), code_(code) {
  if (!object.is_object()) {
    throw Error(code, (path_.empty() ? std::string("the document") : path_) + " is " + shown(object) +
                          "; a JSON object is expected");
  }
}

void Fields::refuse(const std::string& key, const std::string& message) const {
  throw Error(code_, path_of(key) + " " + message);
}

void Fields::refuse_type(const std::string& key, const Json& value, const char* expected) const {
  refuse(key, "is " + shown(value) + "; " + expected + " is expected");
}

const Json* Fields::find(const std::string& key) {
  known_.push_back(key);
  const auto at = object_->find(key);
  return at == object_->end() || at->is_null() ? nullptr : &*at;
}

const Json& Fields::required(const std::string& key) {
  const Json* value = find(key);
  if (value == nullptr) {
    refuse(key, "is missing; docs/reference/file-formats.md lists the fields");
  }
  return *value;
}

std::string Fields::text(const std::string& key, std::optional<std::string> otherwise) {
  if (otherwise && find(key) == nullptr) {
    return *otherwise;
  }
  const Json& value = required(key);
  if (!value.is_string()) {
    refuse_type(key, value, "a text");
  }
  return value.get<std::string>();
}

double Fields::number(const std::string& key, double min, double max, std::optional<double> otherwise) {
  if (otherwise && find(key) == nullptr) {
    return *otherwise;
  }
  const Json& value = required(key);
  if (!value.is_number()) {
    refuse_type(key, value, "a number");
  }
  const double number = value.get<double>();
  if (!(number >= min && number <= max)) {
    refuse(key, "is " + shown(value) + "; it must lie between " + number_text(min) + " and " + number_text(max));
  }
  return number;
}

int64_t Fields::integer(const std::string& key, int64_t min, int64_t max, std::optional<int64_t> otherwise) {
  if (otherwise && find(key) == nullptr) {
    return *otherwise;
  }
  const Json& json = required(key);
  const double value = number(key, static_cast<double>(min), static_cast<double>(max));
  if (value != std::floor(value)) {
    refuse(key, "is " + number_text(value) + "; a whole number is expected");
  }
  // As a double 2^53 + 1 passes for 2^53.
  if (json.is_number_unsigned() && json.get<uint64_t>() > static_cast<uint64_t>(max)) {
    refuse(key, "is " + shown(json) + "; it must be at most " + std::to_string(max));
  }
  return static_cast<int64_t>(value);
}

void Fields::expect_version_1() {
  if (integer("version", 1, 1'000'000) != 1) {
    refuse("version", "is not 1, the only version that this gradcast reads; upgrade gradcast, or write the file anew");
  }
}

std::string Fields::rest() const {
  Json rest = Json::object();
  for (const auto& [key, value] : object_->items()) {
    if (std::find(known_.begin(), known_.end(), key) == known_.end()) {
      rest[key] = value;
    }
  }
  return rest.empty() ? "" : dump(rest);
}

void add_rest(Json& object, const std::string& extra_json) {
  if (extra_json.empty()) {
    return;
  }
  const Json extra = Json::parse(extra_json);
  for (const auto& [key, value] : extra.items()) {
    object[key] = value;
  }
}

Json whole_ns(double time_ns) {
  const double rounded = std::round(time_ns);
  // Above 2^53 an integer would pretend to a precision that a double does not have.
  return std::abs(rounded) <= kTimeMaxNs ? Json(static_cast<int64_t>(rounded)) : Json(rounded);
}

std::string to_text(const Json& object, const char* rows) {
  std::string text = "{";
  const char* separator = "\n";
  for (const auto& [key, value] : object.items()) {
    text += separator + dump(Json(key)) + ": ";
    separator = ",\n";
    if (key != rows) {
      text += dump(value);
      continue;
    }
    text += "[";
    const char* row_separator = "\n";
    for (const Json& row : value) {
      text += row_separator + std::string("  ") + dump(row);
      row_separator = ",\n";
    }
    text += "\n]";
  }
  return text + "\n}\n";
}

}  // namespace gradcast
