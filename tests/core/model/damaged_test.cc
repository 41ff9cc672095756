// Damaged files: whatever happens to the bytes of a profile, plan, link or layer table, its reader takes them or says why
// not in a clean sentence. What it takes survives being written and read again, and can be planned or played.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "gradcast/networks.h"
#include "gradcast/play.h"
#include "gradcast/policy.h"
#include "tests/core/profiles.h"
#include "tests/core/published.h"
#include "tests/support/refusals.h"
#include "tests/support/seeds.h"

namespace gradcast {
namespace {

// A few changes at random places: bytes swapped for others that JSON knows, pieces dropped or doubled, odd values put in.
std::string damaged(Random& random, std::string text) {
  static constexpr std::string_view kAlphabet = "{}[]\",:0123456789.-+eEntrufals \n\\\x01\xff";
  const std::vector<std::string> odd = {"-1",   "1e308", "9007199254740993", "-0.0",    "null",    "\"\"", "NaN",
                                        "[[[[", "1e400", "\\u0000",          "\\ud800", "1e-308,", "\xff", "\r\n"};
  for (int64_t edits = random.integer(1, 4); edits > 0 && !text.empty(); --edits) {
    const auto at = static_cast<size_t>(random.integer(0, static_cast<int64_t>(text.size()) - 1));
    const auto size = static_cast<size_t>(random.integer(1, 12));
    const int64_t kind = random.integer(0, 4);
    if (kind == 0) {
      text.erase(at, size);
    } else if (kind == 1) {
      text.insert(at, text.substr(static_cast<size_t>(random.integer(0, static_cast<int64_t>(at))), size));
    } else if (kind == 2) {
      text.replace(at, std::min(size, text.size() - at),
                   odd[static_cast<size_t>(random.integer(0, static_cast<int64_t>(odd.size()) - 1))]);
    } else {
      text[at] = kAlphabet[static_cast<size_t>(random.integer(0, static_cast<int64_t>(kAlphabet.size()) - 1))];
    }
  }
  return text;
}

Profile whole_profile() {
  Profile profile = profile_from_layer_table(published_layers("vgg16"), {});
  profile.link = ring_link({.latency_ns = 5e4, .bandwidth_bytes_per_s = 1e9}, 8);
  return profile;
}

// Times become whole nanoseconds when they are written, so the second text is the fixed point.
template <typename Value>
void expect_survives(const Value& value, Value (*read)(std::string_view)) {
  const Value again = read(to_json(value));
  EXPECT_EQ(read(to_json(again)), again);
}

void use_profile(const Profile& profile) {
  check_profile(profile);
  expect_survives(profile, &profile_from_json);
  if (profile.link != LinkModel{}) {
    const Plan plan = make_plan(profile, profile.link, {.policy = "ddp"});
    EXPECT_GE(plan.predicted_ns, plan.bound_ns * (1 - 1e-9) - 1);
  }
}

struct Reader {
  const char* name;
  std::function<std::string()> text;
  std::function<void(const std::string& text)> use;
};

void PrintTo(const Reader& reader, std::ostream* out) {
  *out << reader.name;
}

class DamagedFile : public ::testing::TestWithParam<Reader> {};

TEST_P(DamagedFile, IsReadOrRefused) {
  const std::string text = GetParam().text();
  const uint64_t seeds = seed_count(3000);
  uint64_t read_count = 0;
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    const std::string changed = damaged(random, text);
    try {
      GetParam().use(changed);
      ++read_count;
    } catch (const Error& error) {
      EXPECT_NE(error.code(), ErrorCode::kInternal);
      expect_clean(error.what());
    }
    ASSERT_FALSE(HasFailure()) << changed;
  }
  // Some get through (a changed digit, a changed name) and most do not; otherwise the damage tests nothing.
  EXPECT_GT(read_count, seeds / 100);
  EXPECT_LT(read_count, seeds * 9 / 10);
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, DamagedFile,
    ::testing::Values(Reader{"profile", [] { return to_json(whole_profile()); },
                             [](const std::string& text) { use_profile(profile_from_json(text)); }},
                      Reader{"plan", [] { return to_json(make_plan(whole_profile(), whole_profile().link, {})); },
                             [](const std::string& text) {
                               static const Profile profile = whole_profile();
                               const Plan plan = plan_from_json(text);
                               expect_survives(plan, &plan_from_json);
                               check_plan(plan, profile);
                               play(profile, profile.link, plan);
                             }},
                      Reader{"link", [] { return to_json(whole_profile().link); },
                             [](const std::string& text) { expect_survives(link_from_json(text), &link_from_json); }},
                      Reader{"table", [] { return published_layers("vgg16"); },
                             [](const std::string& text) { use_profile(profile_from_layer_table(text, {})); }}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace gradcast
