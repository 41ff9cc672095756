// Reading and writing JSON objects whose errors name the field, and whose unknown fields survive.
//
// nlohmann-json parses; this adds what a person who edits a file needs: a path such as "tensors[3].ready_ns" in every
// message, limits on numbers, and the fields that this version does not know, kept for the one that wrote them.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
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

  // Each throws with the field's path when the field is missing (the forms without `otherwise`) or of another type or
  // range.
  std::string text(const char* key);
  std::string text(const char* key, std::string otherwise);
  double number(const char* key, double min, double max);
  double number(const char* key, double min, double max, double otherwise);
  int64_t integer(const char* key, int64_t min, int64_t max);
  int64_t integer(const char* key, int64_t min, int64_t max, int64_t otherwise);
  const Json& array(const char* key);
  // nullptr where the field is absent or null.
  const Json* find(const char* key);

  // "version" must be 1.
  void expect_version_1();

  // The fields that nobody asked for, as the text of a JSON object; "" if there are none.
  std::string rest() const;

  std::string path_of(std::string_view key) const;
  [[noreturn]] void refuse(std::string_view key, const std::string& message) const;

 private:
  const Json& required(const char* key);

  const Json* object_;
  std::string path_;
  ErrorCode code_;
  std::vector<std::string> known_;  // copies: callers may build a key that does not outlive the call
};

// Appends the fields of `extra_json` ("" or the text of an object) to `object`.
void add_rest(Json& object, const std::string& extra_json);

// A time as JSON holds it: rounded to a whole nanosecond.
Json whole_ns(double time_ns);

// `object` as text for people and diffs: one line per field, and one line per element of the array in field `rows`.
std::string to_text(const Json& object, const char* rows);

}  // namespace gradcast
