// Numbers as messages show them: as short as ten digits allow.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdio>
#include <string>

namespace gradcast {

inline std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.10g", value);
  return text;
}

}  // namespace gradcast
