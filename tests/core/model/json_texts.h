// What the tests of the JSON readers share: texts changed in one place.
//
// Thread safety: pure; any thread.
#pragma once

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tests/support/refusals.h"

namespace gradcast {

inline bool contains(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

// `text` with the first `from` replaced.
inline std::string with(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

struct BadField {
  const char* from;
  const char* to;
  const char* text;                              // in the message
  std::optional<ErrorCode> code = std::nullopt;  // if not that of the whole text
};

// Each change of `whole` is refused with the field by name, and every text that ends too early.
template <typename Read>
void expect_refused(const Read& read, const std::string& whole, const std::vector<BadField>& cases, ErrorCode code) {
  for (const BadField& c : cases) {
    SCOPED_TRACE(std::string(c.from) + " -> " + c.to);
    expect_refused([&] { read(with(whole, c.from, c.to)); }, c.code.value_or(code), c.text);
  }
  for (size_t size = 0; size < whole.size(); ++size) {
    SCOPED_TRACE(size);
    expect_refused([&] { read(whole.substr(0, size)); }, code, "truncated");
  }
}

}  // namespace gradcast
