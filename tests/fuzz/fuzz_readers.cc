// Goal: whatever bytes a file holds, reading it ends in a value that survives being written and read again, or in one
// Error that speaks to the user. Method: libFuzzer on the four readers, the first byte choosing which.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "gradcast/error.h"
#include "gradcast/plan.h"
#include "gradcast/profile.h"

namespace {

using namespace gradcast;

[[noreturn]] void fail(const char* what, const std::string& text) {
  std::fprintf(stderr, "%s: %s\n", what, text.c_str());
  std::abort();
}

// Times become whole nanoseconds when they are written, so the second text is the fixed point.
template <typename Value>
void check_round_trip(const Value& value, Value (*read)(std::string_view)) {
  const std::string once = to_json(value);
  const std::string twice = to_json(read(once));
  if (once != twice) {
    fail("a round trip changed it", once + "\n" + twice);
  }
}

void read_one(uint8_t reader, std::string_view text) {
  switch (reader % 4) {
    case 0:
      return check_round_trip(profile_from_json(text), &profile_from_json);
    case 1:
      return check_round_trip(plan_from_json(text), &plan_from_json);
    case 2:
      return check_round_trip(link_from_json(text), &link_from_json);
    default:
      return check_round_trip(profile_from_layer_table(text, {}), &profile_from_json);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) {
    return 0;
  }
  try {
    read_one(data[0], {reinterpret_cast<const char*>(data) + 1, size - 1});
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kInternal || std::string_view(error.what()).empty()) {
      fail("not a sentence for a user", error.what());
    }
  }
  return 0;
}
