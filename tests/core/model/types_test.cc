// The words of JSON and of the command line, and the errors.
#include "gradcast/types.h"

#include <gtest/gtest.h>

#include <string>

#include "gradcast/error.h"
#include "tests/support/refusals.h"

namespace gradcast {
namespace {

TEST(Types, NamesGoThereAndBack) {
  for (Op op : {Op::kAllReduce, Op::kReduceScatter, Op::kAllGather})
    EXPECT_EQ(op_from_string(to_string(op)), op);
  for (Mode mode : {Mode::kOverlap, Mode::kHook})
    EXPECT_EQ(mode_from_string(to_string(mode)), mode);
  EXPECT_EQ(to_string(Op::kReduceScatter), "reduce_scatter");
  EXPECT_EQ(to_string(Mode::kOverlap), "overlap");
}

TEST(Types, OtherWordsAreRefusedWithTheKnownOnes) {
  for (const char* name : {"", "All_reduce", "all_reduce ", "broadcast"}) {
    expect_refused([&] { op_from_string(name); }, ErrorCode::kInvalidOption, "all_gather");
  }
  expect_refused([] { mode_from_string("overlapped"); }, ErrorCode::kInvalidOption, "use overlap or hook");
}

TEST(Errors, CodesHaveNames) {
  EXPECT_EQ(to_string(ErrorCode::kInvalidProfile), "invalid_profile");
  EXPECT_EQ(to_string(ErrorCode::kInvalidUse), "invalid_use");
  EXPECT_EQ(to_string(ErrorCode::kInternal), "internal");
}

// A broken invariant says what and where, without the folders of the machine that built it.
TEST(Errors, CheckNamesConditionAndFile) {
  try {
    GC_CHECK(1 + 1 == 3);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInternal);
    EXPECT_NE(std::string(error.what()).find("1 + 1 == 3 does not hold at types_test.cc:"), std::string::npos);
  }
}

TEST(BytesText, IsShort) {
  EXPECT_EQ(bytes_text(999), "999 B");
  EXPECT_EQ(bytes_text(37'632), "37.6 kB");
  EXPECT_EQ(bytes_text(999'960), "1.0 MB");
  EXPECT_EQ(bytes_text(int64_t{1} << 53), "9.0 PB");
}

}  // namespace
}  // namespace gradcast
