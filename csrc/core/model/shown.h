// Values of a file as messages show them.
//
// Thread safety: pure; any thread.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace gradcast {

inline std::string dump(const nlohmann::ordered_json& value) {
  return value.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

// The value as JSON, shortened, on one line.
inline std::string shown(const nlohmann::ordered_json& value) {
  std::string text = dump(value);
  constexpr size_t kShownMax = 40;
  if (text.size() <= kShownMax) return text;
  size_t end = kShownMax;
  while ((static_cast<unsigned char>(text[end]) & 0xC0) == 0x80)  // not inside of a character
    --end;
  return text.substr(0, end) + "…";
}

}  // namespace gradcast
