// Profiles from tables of layers: the two bundled tables, the rule for ready and need on a table made by hand, and bad
// tables.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "gradcast/profile.h"
#include "tests/core/published.h"
#include "tests/support/refusals.h"

namespace gradcast {
namespace {

int64_t total_bytes(const Profile& profile) {
  int64_t bytes = 0;
  for (const Tensor& tensor : profile.tensors) {
    bytes += tensor.bytes;
  }
  return bytes;
}

const std::string kTable =
    "layer,forward_ms,backward_ms,parameter_bytes\n"
    "first,1,2,40\n"
    "relu,0.5,0.25,0\n"
    "second,3,4,80\n"
    "third,2,1.5,4\n";

TEST(LayerTable, ReadyAfterTheLayersBehindNeededAfterTheLayersBefore) {
  const Profile profile = profile_from_layer_table(kTable, {"by hand", 1, 4});
  EXPECT_EQ(profile.name, "by hand");
  EXPECT_EQ(profile.world_size, 4);
  EXPECT_DOUBLE_EQ(profile.forward_ns, 6.5e6);
  EXPECT_DOUBLE_EQ(profile.backward_ns, 7.75e6);
  EXPECT_FALSE(profile.link.all_reduce.available());
  ASSERT_EQ(profile.tensors.size(), 3U);
  const auto expect_tensor = [&](size_t i, const char* name, int64_t bytes, double ready_ns, double need_ns) {
    EXPECT_EQ(profile.tensors[i].name, name);
    EXPECT_EQ(profile.tensors[i].bytes, bytes);
    EXPECT_EQ(profile.tensors[i].buffer, 0);
    EXPECT_EQ(profile.tensors[i].element_bytes, 4);
    EXPECT_DOUBLE_EQ(profile.tensors[i].ready_ns, ready_ns) << name;
    EXPECT_DOUBLE_EQ(profile.tensors[i].need_ns, need_ns) << name;
    EXPECT_DOUBLE_EQ(profile.tensors[i].update_ns, 0);
  };
  expect_tensor(0, "first", 40, 7.75e6, 0);  // last of all: its own 2, 0.25, 4 and 1.5
  expect_tensor(1, "second", 80, 5.5e6, 1.5e6);
  expect_tensor(2, "third", 4, 1.5e6, 4.5e6);
  // A scale multiplies every time, and no size.
  const Profile half = profile_from_layer_table(kTable, {"half", 0.5, 1});
  EXPECT_DOUBLE_EQ(half.forward_ns, 3.25e6);
  EXPECT_DOUBLE_EQ(half.backward_ns, 3.875e6);
  EXPECT_DOUBLE_EQ(half.tensors[1].ready_ns, 2.75e6);
  EXPECT_DOUBLE_EQ(half.tensors[1].need_ns, 0.75e6);
  EXPECT_EQ(half.tensors[1].bytes, 80);
}

TEST(LayerTable, ColumnsAreFoundByName) {
  const Profile expected = profile_from_layer_table(kTable, {});
  const std::string other =
      "parameter_bytes,device,backward_ms,layer,forward_ms\r\n"
      "40,a,2,first,1\r\n"
      "0,a,0.25,relu,0.5\r\n"
      "80,\"a, b\",4,second,3\r\n"
      "\r\n"
      "4,\"\",1.5,third,2";
  EXPECT_EQ(profile_from_layer_table(other, {}), expected);
}

TEST(LayerTable, TensorsOfEqualLayersGetNamesOfTheirOwn) {
  const std::string table =
      "layer,forward_ms,backward_ms,parameter_bytes\nconv,1,1,4\nrelu,1,1,0\nconv #2,1,1,4\nrelu,1,1,0\nconv,1,1,4\n";
  const Profile profile = profile_from_layer_table(table, {});
  ASSERT_EQ(profile.tensors.size(), 3U);
  EXPECT_EQ(profile.tensors[0].name, "conv");
  EXPECT_EQ(profile.tensors[1].name, "conv #2");
  EXPECT_EQ(profile.tensors[2].name, "conv #3");
  EXPECT_EQ(profile_from_json(to_json(profile)), profile);
}

TEST(LayerTable, QuotedCells) {
  const std::string table =
      "layer,forward_ms,backward_ms,parameter_bytes\n"
      "\"Conv2d(3, 64, \"\"same\"\")\nsecond line\",1,2,\"40\"\n";
  const Profile profile = profile_from_layer_table(table, {});
  ASSERT_EQ(profile.tensors.size(), 1U);
  EXPECT_EQ(profile.tensors[0].name, "Conv2d(3, 64, \"same\")\nsecond line");
  EXPECT_EQ(profile.tensors[0].bytes, 40);
}

// Counts and sums of the two files, taken from them by other means.
TEST(LayerTable, BundledTables) {
  const Profile resnet = profile_from_layer_table(published_layers("resnet50"), {"resnet50", 1, 8});
  EXPECT_EQ(resnet.tensors.size(), 107U);
  EXPECT_EQ(total_bytes(resnet), 102'228'128);
  EXPECT_NEAR(resnet.forward_ns, 182.488e6, 1);
  EXPECT_NEAR(resnet.backward_ns, 260.931e6, 1);
  EXPECT_EQ(resnet.tensors[0].name, "Conv2d(3, 64, kernel_size=(7, 7), stride=(2, 2), padding=(3, 3), bias=False)");
  EXPECT_DOUBLE_EQ(resnet.tensors[0].ready_ns, resnet.backward_ns);
  EXPECT_DOUBLE_EQ(resnet.tensors[0].need_ns, 0);
  EXPECT_EQ(resnet.tensors[106].bytes, 8'196'000);
  EXPECT_DOUBLE_EQ(resnet.tensors[106].ready_ns, 0.185e6);
  EXPECT_NEAR(resnet.tensors[106].need_ns, 182.488e6 - 0.422e6, 1);

  const Profile vgg = profile_from_layer_table(published_layers("vgg16"), {"vgg16", 1, 8});
  EXPECT_EQ(vgg.tensors.size(), 16U);
  EXPECT_EQ(total_bytes(vgg), 553'430'176);
  EXPECT_NEAR(vgg.forward_ns, 233.902e6, 1);
  EXPECT_NEAR(vgg.backward_ns, 438.633e6, 1);
  for (const Profile& nested : {resnet, vgg}) {
    EXPECT_TRUE(std::ranges::is_sorted(nested.tensors, {}, &Tensor::need_ns));
    EXPECT_TRUE(std::ranges::is_sorted(nested.tensors, std::greater<>(), &Tensor::ready_ns));
  }
}

// What spreadsheets make of a table: a byte order mark, spaces, line ends of two characters.
TEST(LayerTable, ReadsWhatSpreadsheetsWrite) {
  const Profile profile = profile_from_layer_table(
      "\xef\xbb\xbflayer, forward_ms, backward_ms, parameter_bytes\r\n a , 1 , 2 , 6\r\nb,1,2,4\r\n", {});
  ASSERT_EQ(profile.tensors.size(), 2U);
  EXPECT_EQ(profile.tensors[0].name, "a");
  EXPECT_EQ(profile.tensors[0].need_ns, 0);
  // 6 bytes are no whole number of 4-byte elements.
  EXPECT_EQ(profile.tensors[1].element_bytes, 2);
}

TEST(LayerTable, RefusesBadTables) {
  const std::string header = "layer,forward_ms,backward_ms,parameter_bytes\n";
  struct Case {
    std::string csv;
    const char* text;
  };
  const std::vector<Case> cases = {
      {"", "no layers"},
      {"\n\n", "no layers"},
      {header, "no layers"},
      {"layer,forward_ms,parameter_bytes\na,1,4\n", "backward_ms"},
      {"name,forward_ms,backward_ms,parameter_bytes\na,1,2,4\n", "layer"},
      {header + "a,1,2\n", "line 2"},
      {header + "a,1,2,4,5\n", "line 2"},
      {header + "a,1,2,4\nb,-1,2,4\n", "line 3: forward_ms"},
      {header + "a,nan,2,4\n", "line 2: forward_ms"},
      {header + "a,1,inf,4\n", "line 2: backward_ms"},
      {header + "a,1,,4\n", "line 2: backward_ms"},
      {header + "a,1,2 ms,4\n", "line 2: backward_ms"},
      {header + "a,1,2,4.5\n", "line 2: parameter_bytes"},
      {header + "a,1,2,-4\n", "line 2: parameter_bytes"},
      {header + "a,1,2,1e17\n", "line 2: parameter_bytes"},
      {header + "a,1,2,9007199254740993\n", "line 2: parameter_bytes"},
      {header + "a,1,2,many\n", "line 2: parameter_bytes"},
      {header + "a,1,2,0\n", "nothing to send"},
      {"layer;forward_ms;backward_ms;parameter_bytes\na;1;2;4\n", "separated by commas"},
      {header + "\"a,1,2,4\n", "line 2"},
      {header + "a,1e300,2,4\n", "forward"},
      {std::string("\x89PNG\r\n\x1a\n\0\0\0\r", 12), "layer"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.csv);
    expect_refused([&] { profile_from_layer_table(c.csv, {}); }, ErrorCode::kInvalidProfile, c.text);
  }
  for (const double scale : {0.0, -1.0, std::nan(""), HUGE_VAL}) {
    expect_refused([&] { profile_from_layer_table(kTable, {"x", scale, 1}); }, ErrorCode::kInvalidOption, "scale");
  }
  expect_refused([&] { profile_from_layer_table(kTable, {"x", 1, 0}); }, ErrorCode::kInvalidProfile, "world_size");
  expect_refused([&] { profile_from_layer_table(kTable, {"x", 1e300, 1}); }, ErrorCode::kInvalidProfile, "forward");
}

}  // namespace
}  // namespace gradcast
