// What the tests of the JSON readers share: texts changed in one place by hand, or in a few at random.
//
// Thread safety: pure; any thread.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "gradcast/error.h"
#include "tests/core/profiles.h"

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
  const char* text;  // in the message
  ErrorCode code = ErrorCode::kInvalidProfile;
};

// Damages a text in a few places: bytes swapped for others that JSON knows, pieces dropped or doubled.
inline std::string damaged(Random& random, std::string text) {
  static constexpr std::string_view kAlphabet = "{}[]\",:0123456789.-+eEntrufals \n\\\x01\xff";
  for (int64_t edits = random.integer(1, 4); edits > 0 && !text.empty(); --edits) {
    const auto at = static_cast<size_t>(random.integer(0, static_cast<int64_t>(text.size()) - 1));
    const auto size = static_cast<size_t>(random.integer(1, 12));
    const int64_t kind = random.integer(0, 3);
    if (kind == 0) {
      text.erase(at, size);
    } else if (kind == 1) {
      text.insert(at, text.substr(static_cast<size_t>(random.integer(0, static_cast<int64_t>(at))), size));
    } else {
      text[at] = kAlphabet[static_cast<size_t>(random.integer(0, static_cast<int64_t>(kAlphabet.size()) - 1))];
    }
  }
  return text;
}

}  // namespace gradcast
