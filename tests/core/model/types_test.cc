// The words of JSON and of the command line, and the errors.
#include "gradcast/types.h"

#include <gtest/gtest.h>

#include <string>

#include "gradcast/error.h"

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
    try {
      op_from_string(name);
      ADD_FAILURE() << name;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidOption);
      EXPECT_NE(std::string(error.what()).find("all_gather"), std::string::npos);
    }
  }
  EXPECT_THROW(mode_from_string("overlapped"), Error);
}

TEST(Errors, CodesHaveNames) {
  EXPECT_EQ(to_string(ErrorCode::kInvalidProfile), "invalid_profile");
  EXPECT_EQ(to_string(ErrorCode::kInvalidPlan), "invalid_plan");
  EXPECT_EQ(to_string(ErrorCode::kInvalidLink), "invalid_link");
  EXPECT_EQ(to_string(ErrorCode::kInvalidOption), "invalid_option");
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

}  // namespace
}  // namespace gradcast
