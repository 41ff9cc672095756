// Profiles and links as JSON: what goes round unchanged, what is filled in, and what is refused with the field by name.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "gradcast/profile.h"
#include "tests/core/hand_profiles.h"
#include "tests/core/model/json_texts.h"
#include "tests/core/profiles.h"
#include "tests/support/refusals.h"

namespace gradcast {
namespace {

const std::string kProfile = R"({
  "version": 1, "name": "small", "world_size": 8, "forward_ns": 800, "backward_ns": 1000,
  "tensors": [
    {"name": "a", "bytes": 400, "buffer": 0, "element_bytes": 4, "ready_ns": 1000, "need_ns": 0, "update_ns": 7},
    {"name": "b", "bytes": 80, "ready_ns": 600, "need_ns": 300},
    {"name": "c", "bytes": 6, "buffer": 1, "element_bytes": 2, "ready_ns": 200, "need_ns": 500}
  ],
  "link": {
    "all_reduce": [
      {"up_to_bytes": 100, "alpha_ns": 50, "beta_ns_per_byte": 1.5},
      {"up_to_bytes": null, "alpha_ns": 120, "beta_ns_per_byte": 0.875}],
    "reduce_scatter": [{"up_to_bytes": null, "alpha_ns": 30, "beta_ns_per_byte": 0.5}],
    "all_gather": [{"up_to_bytes": null, "alpha_ns": 20, "beta_ns_per_byte": 0.25}]
  }
})";

TEST(ProfileJson, ReadsEveryField) {
  const Profile profile = profile_from_json(kProfile);
  Profile expected = profile_of(1000, 800, {{400, 1000, 0, 7}, {80, 600, 300}, {6, 200, 500, 0, 1}});
  expected.name = "small";
  expected.world_size = 8;
  expected.tensors[0].name = "a";
  expected.tensors[1].name = "b";
  expected.tensors[2].name = "c";
  expected.tensors[0].element_bytes = expected.tensors[1].element_bytes = 4;
  expected.tensors[2].element_bytes = 2;
  expected.link.all_reduce.pieces = {{100, 50, 1.5}, {kUnboundedBytes, 120, 0.875}};
  expected.link.reduce_scatter.pieces = {{kUnboundedBytes, 30, 0.5}};
  expected.link.all_gather.pieces = {{kUnboundedBytes, 20, 0.25}};
  EXPECT_EQ(profile, expected);
}

TEST(ProfileJson, FillsInDefaultsAndTakesAnEmptyLinkForNone) {
  const std::string head = R"({"version":1,"name":"x","world_size":2,"forward_ns":5,"backward_ns":5,
                               "tensors":[{"name":"a","bytes":8,"ready_ns":1,"need_ns":2}])";
  Profile expected = profile_of(5, 5, {{8, 1, 2}});
  expected.name = "x";
  expected.world_size = 2;
  expected.tensors[0].name = "a";
  expected.tensors[0].element_bytes = 4;
  for (const char* tail : {"}", R"(,"link":null})", R"(,"link":{}})"}) {
    EXPECT_EQ(profile_from_json(head + tail), expected) << tail;
  }
}

TEST(ProfileJson, BringsEqualNeedsIntoUrgencyOrder) {
  const std::string text =
      with(with(kProfile, "\"need_ns\": 300", "\"need_ns\": 0"), "\"ready_ns\": 1000", "\"ready_ns\": 1");
  const Profile profile = profile_from_json(text);
  EXPECT_EQ(profile.tensors[0].name, "b");
  EXPECT_EQ(profile.tensors[1].name, "a");
}

TEST(ProfileJson, KeepsUnknownFields) {
  std::string text =
      with(kProfile, "\"name\": \"small\"", "\"host\": {\"gpu\": [1, 2.5, null, \"\\u00e9\"]}, \"name\": \"small\"");
  text = with(text, "\"name\": \"b\"", "\"dtype\": \"float32\", \"name\": \"b\"");
  text = with(text, "\"link\": {", "\"link\": {\"measured\": true,");
  text = with(text, "\"alpha_ns\"", "\"samples\": 12, \"alpha_ns\"");
  const Profile profile = profile_from_json(text);
  const Profile again = profile_from_json(to_json(profile));
  EXPECT_EQ(again, profile);
  for (const char* kept : {"host", "gpu", "2.5", "\u00e9", "dtype", "float32", "measured", "samples"}) {
    EXPECT_TRUE(contains(to_json(again), kept)) << kept;
  }
  EXPECT_TRUE(contains(again.tensors[1].extra_json, "float32"));
  EXPECT_EQ(again.tensors[0].extra_json, "");
}

TEST(ProfileJson, RoundsTimesToNearest) {
  Profile profile = profile_of(10.6, 20.4, {{4, 10.5, 0.49, 1.51}});
  profile.world_size = 2;
  const Profile again = profile_from_json(to_json(profile));
  EXPECT_EQ(again.backward_ns, 11);
  EXPECT_EQ(again.forward_ns, 20);
  EXPECT_EQ(again.tensors[0].ready_ns, 11);
  EXPECT_EQ(again.tensors[0].need_ns, 0);
  EXPECT_EQ(again.tensors[0].update_ns, 2);
  EXPECT_TRUE(contains(to_json(profile), "\"ready_ns\":11,")) << to_json(profile);
}

TEST(ProfileJson, RandomProfilesGoRound) {
  for (uint64_t seed = 1; seed <= 500; ++seed) {
    RandomProfileOptions options;
    options.windows = static_cast<RandomProfileOptions::Windows>(seed % 3);
    options.buffer_count = 1 + static_cast<int32_t>(seed % 2);
    options.link_piece_count = 1 + static_cast<int32_t>(seed % 4);
    options.updates = seed % 5 == 0;
    options.pack_share = seed % 3 == 0 ? 0.3 : 0;
    const Profile profile = random_profile(seed, options);
    const Profile again = profile_from_json(to_json(profile));
    ASSERT_EQ(again, profile) << "seed " << seed;
    ASSERT_EQ(to_json(again), to_json(profile)) << "seed " << seed;
    ASSERT_EQ(link_from_json(to_json(profile.link)), profile.link) << "seed " << seed;
  }
}

TEST(ProfileJson, TheLargestNumbersGoRound) {
  Profile profile = profile_of(kTimeMaxNs, kTimeMaxNs, {{kBytesMax, kTimeMaxNs, kTimeMaxNs, kTimeMaxNs}});
  profile.world_size = INT32_MAX;
  EXPECT_EQ(profile_from_json(to_json(profile)), profile);
}

constexpr ErrorCode kLink = ErrorCode::kInvalidLink;

TEST(ProfileJson, RefusesBadFieldsByName) {
  const std::vector<BadField> cases = {
      {"\"version\": 1,", "", "version"},
      {"\"version\": 1", "\"version\": 2", "version"},
      {"\"name\": \"small\",", "", "name"},
      {"\"world_size\": 8", "\"world_size\": 0", "world_size"},
      {"\"forward_ns\": 800", "\"forward_ns\": -800", "forward_ns"},
      {"\"backward_ns\": 1000", "\"backward_ns\": null", "backward_ns"},
      {"\"backward_ns\": 1000", "\"backward_ns\": 900", "tensors[0].ready_ns"},
      {"\"tensors\": [", "\"others\": [", "tensors"},
      {"\"name\": \"b\"", "\"name\": null", "tensors[1].name"},
      {"\"name\": \"c\"", "\"name\": \"a\"", "tensors[2].name is \"a\", as that of tensors[0]"},
      {"\"need_ns\": 300", "\"bytes\": 80", "the field \"bytes\" twice"},
      {"\"bytes\": 80", "\"bytes\": 0", "tensors[1].bytes"},
      {"\"bytes\": 80", "\"bytes\": 80.5", "tensors[1].bytes"},
      {"\"bytes\": 80", "\"bytes\": 9007199254740993", "tensors[1].bytes"},
      {"\"bytes\": 80", "\"bytes\": 18446744073709551616", "tensors[1].bytes"},
      {"\"ready_ns\": 600", "\"ready_ns\": 1001", "tensors[1].ready_ns"},
      {"\"update_ns\": 7", "\"update_ns\": -7", "tensors[0].update_ns"},
      {"\"element_bytes\": 2", "\"element_bytes\": 0", "tensors[2].element_bytes"},
      {"\"buffer\": 1", "\"buffer\": 4294967296", "tensors[2].buffer"},
      {"\"buffer\": 1", "\"buffer\": \"gpu\"", "tensors[2].buffer"},
      {"\"link\": {", "\"link\": 3, \"rest\": {", "link", kLink},
      {"\"all_reduce\"", "\"all_reduced\"", "link.all_reduce", kLink},
      {"\"up_to_bytes\": 100", "\"up_to_bytes\": 0", "link.all_reduce[0].up_to_bytes", kLink},
      {"\"alpha_ns\": 50", "\"alpha_ns\": -50", "link.all_reduce[0].alpha_ns", kLink},
      {"\"beta_ns_per_byte\": 0.25", "\"beta_ns_per_byte\": \"0.25\"", "link.all_gather[0].beta_ns_per_byte", kLink},
      {"\"all_reduce\": [", "\"pack_ns_per_byte\": -1, \"all_reduce\": [", "link.pack_ns_per_byte", kLink},
  };
  expect_refused(&profile_from_json, kProfile, cases, ErrorCode::kInvalidProfile);
}

TEST(ProfileJson, RefusesOtherShapes) {
  const auto refused = [](const std::string& text, const std::string& part) {
    SCOPED_TRACE(text.substr(0, 80));
    expect_refused([&] { profile_from_json(text); }, ErrorCode::kInvalidProfile, part);
  };
  refused("", "truncated");
  refused("[]", "object");
  refused(with(kProfile, "\"ready_ns\": 600", "\"ready_ns\": NaN"), "NaN");
  refused(with(kProfile, "\"ready_ns\": 600", "\"ready_ns\": -Infinity"), "line 5");
  refused(with(kProfile, "\"ready_ns\": 600", "\"ready_ns\": 1e999"), "too large");
  refused(with(kProfile, "\"ready_ns\": 600,", "\"ready_ns\": 600"), "line 5");
  refused(with(kProfile, "\"name\": \"b\"", "\"name\": \"\xff\""), "JSON");
  // A long value is shown by its beginning, whole characters of it.
  std::string long_text;
  for (int i = 0; i < 19; ++i)
    long_text += "\u00e9";
  refused(with(kProfile, "\"bytes\": 80", "\"bytes\": \"" + long_text + long_text + "\""),
          "tensors[1].bytes is \"" + long_text + "\u2026; a number is expected");
  refused(kProfile + "}", "JSON");
  refused(std::string(100'000, '['), "");
  refused(with(kProfile, "\"name\": \"b\"", "\"x\": " + std::string(5000, '[') + std::string(5000, ']')), "deep");
  const std::string none = R"({"version":1,"name":"x","world_size":2,"forward_ns":5,"backward_ns":5,"tensors":)";
  refused(none + "[]}", "tensors");
  refused(none + "[null]}", "tensors[0]");
}

TEST(LinkJson, RefusesWhatIsNoLink) {
  for (const char* text : {"[]", "3", "{}", R"({"all_reduce": []})", R"({"all_reduce": {}})", R"({"all_reduce": [3]})",
                           R"({"all_reduce": [{}]})", R"({"all_gather": [{"alpha_ns": 1, "beta_ns_per_byte": 1}]})"}) {
    SCOPED_TRACE(text);
    expect_refused([&] { link_from_json(text); }, kLink, "link");
  }
}

}  // namespace
}  // namespace gradcast
