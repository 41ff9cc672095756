// What a refused input must say: the code, the field, and nothing of the inside of gradcast or of a library.
//
// Thread safety: pure; any thread.
#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <string>

#include "gradcast/error.h"

namespace gradcast {

// A sentence for a person: not empty, no names from C++, no source files.
inline void expect_clean(const std::string& message) {
  EXPECT_GE(message.size(), 10U);
  for (const char* inside : {"json.exception", "nlohmann", "std::", "parse_error", "type_error", "out_of_range",
                             "basic_", "bad_alloc", "_M_", ".cc", ".h:", ".hpp", "0x", "what()", "stoi", "exception"}) {
    EXPECT_EQ(message.find(inside), std::string::npos) << "\"" << inside << "\" in: " << message;
  }
}

// Expects that `action` throws Error{code} with a clean message that contains `text`.
template <typename Action>
void expect_refused(const Action& action, ErrorCode code, const std::string& text) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(to_string(error.code()), to_string(code)) << error.what();
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos)
        << "\"" << text << "\" is not in: " << error.what();
    expect_clean(error.what());
    return;
  } catch (const std::exception& error) {
    ADD_FAILURE() << "not an Error of gradcast: " << error.what();
    return;
  }
  ADD_FAILURE() << "nothing was refused; a message with \"" << text << "\" was expected";
}

}  // namespace gradcast
