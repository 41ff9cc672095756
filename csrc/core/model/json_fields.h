// Reading and writing JSON objects whose errors name the field, and whose unknown fields survive.
//
// nlohmann-json parses; this adds what a person who edits a file needs: a path such as "tensors[3].ready_ns" in every
// message, limits on numbers, and the fields that this version does not know, kept for the one that wrote them.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "gradcast/error.h"
#include "gradcast/types.h"

namespace gradcast {

using Json = nlohmann::ordered_json;

// Parses a whole document. `what` ("profile") and `code` are for the message, which has line and column.
Json parse_json(std::string_view text, const char* what, ErrorCode code);

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

  // The fields that nobody asked for, as the text of a JSON object; "" if there are none.
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

// Appends the fields of `extra_json` ("" or the text of an object) to `object`.
void add_rest(Json& object, const std::string& extra_json);

// A time as JSON holds it: rounded to a whole nanosecond.
Json whole_ns(double time_ns);

// `object` as text for people and diffs: one line per field, and one line per element of the array in field `rows`.
std::string to_text(const Json& object, const char* rows);

}  // namespace gradcast
