// Profiles, links and plans as JSON, schema version 1.
//
// nlohmann-json parses; Fields adds what a person who edits a file needs: a path such as "tensors[3].ready_ns" in every
// message, limits on numbers, and the fields that this version does not know, kept for the one that wrote them.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "gradcast/error.h"
#include "gradcast/plan.h"
#include "gradcast/profile.h"
#include "model/shown.h"

namespace gradcast {
namespace {

using Json = nlohmann::ordered_json;

// No file of ours nests deeper than 6; unknown fields may, but not so deep that writing them back could exhaust the
// stack.
constexpr size_t kDepthMax = 64;

std::string line_and_column(std::string_view text, size_t byte) {
  const std::string_view before = text.substr(0, std::min(byte, text.size()));
  const auto line = std::count(before.begin(), before.end(), '\n') + 1;
  const size_t line_start = before.rfind('\n');
  const size_t column = line_start == std::string_view::npos ? before.size() : before.size() - line_start - 1;
  return "line " + std::to_string(line) + ", column " + std::to_string(std::max<size_t>(column, 1));
}

// Refuses what a parser takes: very deep documents, and objects with a field twice. A pass of its own, because a parser
// with a callback looks at all elements of an array after each of them.
class Structure final : public nlohmann::json_sax<Json> {
 public:
  Structure(std::string what, ErrorCode code) : what_(std::move(what)), code_(code) {}

  bool null() override { return true; }
  bool boolean(bool /*value*/) override { return true; }
  bool number_integer(number_integer_t /*value*/) override { return true; }
  bool number_unsigned(number_unsigned_t /*value*/) override { return true; }
  bool number_float(number_float_t /*value*/, const string_t& /*text*/) override { return true; }
  bool string(string_t& /*value*/) override { return true; }
  bool binary(binary_t& /*value*/) override { return true; }
  bool start_array(size_t /*size*/) override { return open(); }
  bool end_array() override { return close(); }
  bool start_object(size_t /*size*/) override { return open(); }
  bool end_object() override { return close(); }
  bool key(string_t& name) override {
    if (!keys_.back().insert(name).second) {
      throw Error(code_, "the " + what_ + " has an object with the field " + shown(name) +
                             " twice; which one counts is not known");
    }
    return true;
  }
  // The parser says it again, with the place.
  bool parse_error(size_t /*byte*/, const std::string& /*token*/,
                   const nlohmann::detail::exception& /*error*/) override {
    return false;
  }

 private:
  bool open() {
    if (keys_.size() > kDepthMax) {
      throw Error(code_, "the " + what_ + " nests deeper than " + std::to_string(kDepthMax) + " levels");
    }
    keys_.emplace_back();
    return true;
  }
  bool close() {
    keys_.pop_back();
    return true;
  }

  const std::string what_;
  const ErrorCode code_;
  std::vector<std::set<std::string>> keys_;  // of the open objects; those of arrays are empty
};

// Parses a whole document. `what` ("profile") and `code` are for the message, which has line and column.
Json parse_json(std::string_view text, const char* what, ErrorCode code) {
  Structure structure(what, code);
  Json::sax_parse(text, &structure);
  try {
    return Json::parse(text);
  } catch (const Json::parse_error& error) {
    const std::string where = error.byte > text.size() ? "it ends too early (is the file truncated?)"
                                                       : "the error is at " + line_and_column(text, error.byte);
    throw Error(code, std::string("the ") + what + " is not valid JSON: " + where +
                          "; note that JSON has no NaN and no Infinity");
  } catch (const Json::out_of_range&) {
    throw Error(code, std::string("the ") + what + " has a number too large for a double");
  }
}

class Fields {
 public:
  // REQUIRES: `object` outlives this. `path` is "" at the top, else "tensors[3]". Throws if it is no object.
  Fields(const Json& object, std::string path, ErrorCode code);

  // Each throws with the field's path when the field is missing (unless there is an `otherwise`) or of another type or
  // range.
  std::string text(const std::string& key, std::optional<std::string> otherwise = {});
  double number(const std::string& key, double min, double max, std::optional<double> otherwise = {});
  int64_t integer(const std::string& key, int64_t min, int64_t max, std::optional<int64_t> otherwise = {});
  // An array, each element read by `read`, which is given the element and its path.
  template <typename Value>
  std::vector<Value> list(const std::string& key, Value (*read)(const Json&, const std::string& path)) {
    const Json& array = required(key);
    if (!array.is_array()) {
      refuse_type(key, array, "an array");
    }
    std::vector<Value> values;
    values.reserve(array.size());
    for (size_t i = 0; i < array.size(); ++i) {
      values.push_back(read(array[i], path_of(key) + "[" + std::to_string(i) + "]"));
    }
    return values;
  }
  // nullptr where the field is absent or null.
  const Json* find(const std::string& key);

  // "version" must be 1.
  void expect_version_1();

  // The unknown fields, as the text of a JSON object; "" if there are none.
  std::string rest() const;

  [[noreturn]] void refuse(const std::string& key, const std::string& message) const;

 private:
  std::string path_of(const std::string& key) const { return path_.empty() ? key : path_ + "." + key; }
  [[noreturn]] void refuse_type(const std::string& key, const Json& value, const char* expected) const;
  const Json& required(const std::string& key);

  const Json* object_;
  std::string path_;
  ErrorCode code_;
  std::vector<std::string> known_;
};

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
  // 2^53 + 1 as a double is 2^53.
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

// Appends the fields of `extra_json` ("" or the text of an object) to `object`.
void add_rest(Json& object, const std::string& extra_json) {
  if (extra_json.empty()) {
    return;
  }
  const Json extra = Json::parse(extra_json);
  for (const auto& [key, value] : extra.items()) {
    object[key] = value;
  }
}

// A time as JSON holds it: rounded to a whole nanosecond.
Json whole_ns(double time_ns) {
  const double rounded = std::round(time_ns);
  // Above 2^53 an integer would pretend to a precision that a double does not have.
  return std::abs(rounded) <= kTimeMaxNs ? Json(static_cast<int64_t>(rounded)) : Json(rounded);
}

// `object` as text for people and diffs: one line per field, and one line per element of the array in field `rows`.
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

// Of a profile; 0 where they are absent.
constexpr std::pair<const char*, double Profile::*> kPartTimes[] = {{"part_ns", &Profile::part_ns},
                                                                    {"host_step_ns", &Profile::host_step_ns},
                                                                    {"host_part_ns", &Profile::host_part_ns},
                                                                    {"host_block_ns", &Profile::host_block_ns}};

constexpr int32_t kInFlightMax = 1'000'000;
constexpr double kPredictionMaxNs = 1e300;

LinkPiece piece_from(const Json& json, const std::string& path) {
  Fields fields(json, path, ErrorCode::kInvalidLink);
  return {.up_to_bytes = fields.integer("up_to_bytes", 1, kBytesMax, kUnboundedBytes),
          .alpha_ns = fields.number("alpha_ns", 0, kTimeMaxNs),
          .beta_ns_per_byte = fields.number("beta_ns_per_byte", 0, kTimeMaxNs),
          .extra_json = fields.rest()};
}

LinkModel link_from(const Json& json, const std::string& path) {
  Fields fields(json, path, ErrorCode::kInvalidLink);
  LinkModel link;
  for (const Op op : kOps) {
    const std::string name(to_string(op));
    if (fields.find(name) != nullptr) {
      link.of(op).pieces = fields.list(name, &piece_from);
    }
  }
  link.pack_ns_per_byte = fields.number("pack_ns_per_byte", 0, kTimeMaxNs, 0);
  link.extra_json = fields.rest();
  check_link(link);
  return link;
}

Tensor tensor_from(const Json& json, const std::string& path) {
  Fields fields(json, path, ErrorCode::kInvalidProfile);
  // Ranges that need the whole profile (ready within backward, …) are check_profile's.
  return {.name = fields.text("name"),
          .bytes = fields.integer("bytes", 1, kBytesMax),
          .buffer = static_cast<int32_t>(fields.integer("buffer", 0, INT32_MAX, 0)),
          .element_bytes = static_cast<int32_t>(fields.integer("element_bytes", 1, INT32_MAX, 4)),
          .ready_ns = fields.number("ready_ns", 0, kTimeMaxNs),
          .need_ns = fields.number("need_ns", 0, kTimeMaxNs),
          .update_ns = fields.number("update_ns", 0, kTimeMaxNs, 0),
          .extra_json = fields.rest()};
}

template <typename Enum>
Enum word(Fields& fields, const char* key, Enum (*from_string)(std::string_view)) {
  const std::string name = fields.text(key);
  try {
    return from_string(name);
  } catch (const Error& error) {
    fields.refuse(key, std::string("is wrong: ") + error.what());
  }
}

Range range_from(const Json& json, const std::string& path) {
  const auto whole = [](const Json& value) {
    return value.is_number_unsigned() && value.get<uint64_t>() <= static_cast<uint64_t>(kBytesMax);
  };
  if (!json.is_array() || json.size() != 2 || !whole(json[0]) || !whole(json[1]) || json[0] >= json[1]) {
    throw Error(ErrorCode::kInvalidPlan,
                path + " is no range; two whole numbers [lo, hi) are expected, the first below the second");
  }
  return {json[0].get<int64_t>(), json[1].get<int64_t>()};
}

Block block_from(const Json& json, const std::string& path) {
  Fields fields(json, path, ErrorCode::kInvalidPlan);
  // A plan made by hand need not carry predictions.
  return {.op = word(fields, "op", &op_from_string),
          .buffer = static_cast<int32_t>(fields.integer("buffer", 0, INT32_MAX, 0)),
          .ranges = fields.list("ranges", &range_from),
          .start_ns = fields.number("start_ns", 0, kPredictionMaxNs, 0),
          .finish_ns = fields.number("finish_ns", 0, kPredictionMaxNs, 0),
          .reason = fields.text("reason", ""),
          .extra_json = fields.rest()};
}

// Plans and checkpoints name tensors.
void check_names(const std::vector<Tensor>& tensors) {
  std::unordered_map<std::string_view, size_t> indices;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto [other, is_new] = indices.emplace(tensors[i].name, i);
    if (!is_new) {
      throw Error(ErrorCode::kInvalidProfile, "tensors[" + std::to_string(i) + "].name is " +
                                                  shown(Json(tensors[i].name)) + ", as that of tensors[" +
                                                  std::to_string(other->second) + "]; give each its own");
    }
  }
}

Json json_of(const LinkPiece& piece) {
  Json json = {{"up_to_bytes", piece.up_to_bytes == kUnboundedBytes ? Json() : Json(piece.up_to_bytes)},
               {"alpha_ns", piece.alpha_ns},
               {"beta_ns_per_byte", piece.beta_ns_per_byte}};
  add_rest(json, piece.extra_json);
  return json;
}

Json json_of(const Tensor& tensor) {
  Json json = {{"name", tensor.name},
               {"bytes", tensor.bytes},
               {"buffer", tensor.buffer},
               {"element_bytes", tensor.element_bytes},
               {"ready_ns", whole_ns(tensor.ready_ns)},
               {"need_ns", whole_ns(tensor.need_ns)},
               {"update_ns", whole_ns(tensor.update_ns)}};
  add_rest(json, tensor.extra_json);
  return json;
}

Json json_of(const Range& range) {
  return {range.lo_bytes, range.hi_bytes};
}

Json json_of(const Block& block);

template <typename Value>
Json list_of(const std::vector<Value>& values) {
  Json list = Json::array();
  for (const Value& value : values) {
    list.push_back(json_of(value));
  }
  return list;
}

Json json_of(const Block& block) {
  Json json = {{"op", to_string(block.op)},
               {"buffer", block.buffer},
               {"ranges", list_of(block.ranges)},
               {"start_ns", whole_ns(block.start_ns)},
               {"finish_ns", whole_ns(block.finish_ns)},
               {"reason", block.reason}};
  add_rest(json, block.extra_json);
  return json;
}

Json json_of(const LinkModel& link) {
  Json json = Json::object();
  for (const Op op : kOps) {
    if (link.of(op).available()) {
      json[std::string(to_string(op))] = list_of(link.of(op).pieces);
    }
  }
  if (link.pack_ns_per_byte != 0) {
    json["pack_ns_per_byte"] = link.pack_ns_per_byte;
  }
  add_rest(json, link.extra_json);
  return json;
}

}  // namespace

Profile profile_from_json(std::string_view text) {
  const Json json = parse_json(text, "profile", ErrorCode::kInvalidProfile);
  Fields fields(json, "", ErrorCode::kInvalidProfile);
  fields.expect_version_1();
  Profile profile;
  profile.name = fields.text("name");
  profile.world_size = static_cast<int32_t>(fields.integer("world_size", 1, INT32_MAX));
  profile.forward_ns = fields.number("forward_ns", 0, kTimeMaxNs);
  profile.backward_ns = fields.number("backward_ns", 0, kTimeMaxNs);
  profile.tensors = fields.list("tensors", &tensor_from);
  check_names(profile.tensors);
  if (const Json* link = fields.find("link"); link != nullptr && !(link->is_object() && link->empty())) {
    profile.link = link_from(*link, "link");
  }
  for (const auto& [name, time_ns] : kPartTimes) {
    profile.*time_ns = fields.number(name, 0, kTimeMaxNs, 0);
  }
  profile.extra_json = fields.rest();
  check_profile(profile);
  sort_by_urgency(profile);
  return profile;
}

std::string to_json(const Profile& profile) {
  Json json = {{"version", 1},
               {"name", profile.name},
               {"world_size", profile.world_size},
               {"forward_ns", whole_ns(profile.forward_ns)},
               {"backward_ns", whole_ns(profile.backward_ns)},
               {"tensors", list_of(profile.tensors)}};
  if (profile.link != LinkModel{}) {
    json["link"] = json_of(profile.link);
  }
  for (const auto& [name, time_ns] : kPartTimes) {
    if (profile.*time_ns != 0) {
      json[name] = whole_ns(profile.*time_ns);
    }
  }
  add_rest(json, profile.extra_json);
  return to_text(json, "tensors");
}

LinkModel link_from_json(std::string_view text) {
  return link_from(parse_json(text, "link", ErrorCode::kInvalidLink), "link");
}

std::string to_json(const LinkModel& link) {
  return json_of(link).dump(1) + "\n";
}

Plan plan_from_json(std::string_view text) {
  const Json json = parse_json(text, "plan", ErrorCode::kInvalidPlan);
  Fields fields(json, "", ErrorCode::kInvalidPlan);
  fields.expect_version_1();
  return {.policy = fields.text("policy"),
          .mode = word(fields, "mode", &mode_from_string),
          .in_flight = static_cast<int32_t>(fields.integer("in_flight", 1, kInFlightMax, 1)),
          .blocks = fields.list("blocks", &block_from),
          .predicted_ns = fields.number("predicted_ns", 0, kPredictionMaxNs, 0),
          .bound_ns = fields.number("bound_ns", 0, kPredictionMaxNs, 0),
          .plain_bound_ns = fields.number("plain_bound_ns", 0, kPredictionMaxNs, 0),
          .extra_json = fields.rest()};
}

std::string to_json(const Plan& plan) {
  Json json = {{"version", 1},
               {"policy", plan.policy},
               {"mode", to_string(plan.mode)},
               {"in_flight", plan.in_flight},
               {"predicted_ns", whole_ns(plan.predicted_ns)},
               {"bound_ns", whole_ns(plan.bound_ns)},
               {"plain_bound_ns", whole_ns(plan.plain_bound_ns)},
               {"blocks", list_of(plan.blocks)}};
  add_rest(json, plan.extra_json);
  return to_text(json, "blocks");
}

}  // namespace gradcast
