// Numbers as messages show them: as short as ten digits allow, and the limit of sizes and times by its name.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdio>
#include <string>

#include "gradcast/types.h"

namespace gradcast {

inline std::string number_text(double value) {
  if (value == kTimeMaxNs) {
    return "2^53";
  }
  char text[32];
  std::snprintf(text, sizeof text, "%.10g", value);
  return text;
}

}  // namespace gradcast
