// Profiles: what is refused, with the field by name, what is not, and urgency order.
#include "gradcast/profile.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <vector>

#include "tests/core/hand_profiles.h"
#include "tests/support/refusals.h"

namespace gradcast {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinite = std::numeric_limits<double>::infinity();

Profile good() {
  Profile profile = profile_of(10, 8, {{8, 10, 0}, {8, 4, 3}, {4, 0, 5, 0, 1}});
  profile.world_size = 8;
  profile.tensors[0].element_bytes = profile.tensors[1].element_bytes = 4;
  profile.link = link_of(2, 1);
  return profile;
}

TEST(CheckProfile, Accepts) {
  EXPECT_NO_THROW(check_profile(good()));
  Profile no_link = good();
  no_link.link = {};
  EXPECT_NO_THROW(check_profile(no_link));
  // Everything at the ends of its interval.
  EXPECT_NO_THROW(check_profile(profile_of(0, 0, {{1, 0, 0}})));
  EXPECT_NO_THROW(check_profile(profile_of(5, 7, {{kBytesMax, 5, 7}})));
  EXPECT_NO_THROW(check_profile(profile_of(kTimeMaxNs, kTimeMaxNs, {{1, kTimeMaxNs, kTimeMaxNs, kTimeMaxNs}})));
  // Equal needs in any order.
  EXPECT_NO_THROW(check_profile(profile_of(5, 7, {{1, 1, 3}, {1, 5, 3}, {1, 2, 3}})));
}

struct Fault {
  const char* field;
  std::function<void(Profile&)> make;
  ErrorCode code = ErrorCode::kInvalidProfile;
};

void expect_refused(const std::vector<Fault>& faults) {
  for (const Fault& fault : faults) {
    SCOPED_TRACE(fault.field);
    Profile profile = good();
    fault.make(profile);
    expect_refused([&] { check_profile(profile); }, fault.code, fault.field);
  }
}

TEST(CheckProfile, RefusesTimes) {
  for (const double wrong_ns : {-1.0, -1e-9, kNan, kInfinite, -kInfinite, 2 * kTimeMaxNs}) {
    SCOPED_TRACE(wrong_ns);
    expect_refused({{"forward_ns", [&](Profile& profile) { profile.forward_ns = wrong_ns; }},
                    {"backward_ns", [&](Profile& profile) { profile.backward_ns = wrong_ns; }},
                    {"tensors[1].ready_ns", [&](Profile& profile) { profile.tensors[1].ready_ns = wrong_ns; }},
                    {"tensors[2].need_ns", [&](Profile& profile) { profile.tensors[2].need_ns = wrong_ns; }},
                    {"tensors[0].update_ns", [&](Profile& profile) { profile.tensors[0].update_ns = wrong_ns; }}});
  }
}

TEST(CheckProfile, RefusesEveryFaultByItsField) {
  expect_refused({// Times outside of their pass.
                  {"tensors[0].ready_ns", [](Profile& profile) { profile.tensors[0].ready_ns = 10.5; }},
                  {"tensors[2].need_ns", [](Profile& profile) { profile.tensors[2].need_ns = 8.5; }},
                  {"tensors[1].need_ns", [](Profile& profile) { profile.tensors[0].need_ns = 4; }},
                  {"tensors[2].need_ns", [](Profile& profile) { profile.tensors[2].need_ns = 1; }},
                  {"tensors[1].bytes", [](Profile& profile) { profile.tensors[1].bytes = 0; }},
                  {"tensors[1].bytes", [](Profile& profile) { profile.tensors[1].bytes = -4; }},
                  {"tensors[1].bytes", [](Profile& profile) { profile.tensors[1].bytes = kBytesMax + 4; }},
                  {"2^53", [](Profile& profile) { profile.tensors[1].bytes = kBytesMax - 4; }},
                  {"tensors[1].element_bytes", [](Profile& profile) { profile.tensors[1].element_bytes = 0; }},
                  {"tensors[1].element_bytes", [](Profile& profile) { profile.tensors[1].element_bytes = -4; }},
                  {"tensors[1].element_bytes", [](Profile& profile) { profile.tensors[1].element_bytes = 3; }},
                  // Two element sizes in one buffer.
                  {"tensors[1].element_bytes", [](Profile& profile) { profile.tensors[1].element_bytes = 2; }},
                  {"tensors", [](Profile& profile) { profile.tensors.clear(); }},
                  {"world_size", [](Profile& profile) { profile.world_size = 0; }},
                  {"tensors[2].buffer", [](Profile& profile) { profile.tensors[2].buffer = -1; }},
                  {"tensors[2].buffer", [](Profile& profile) { profile.tensors[2].buffer = 1'000'000'000; }},
                  {"link.all_reduce", [](Profile& profile) { profile.link.all_reduce.pieces[0].alpha_ns = kNan; },
                   ErrorCode::kInvalidLink}});
}

TEST(CheckProfile, RefusesTotalsBeyondCounting) {
  // Each size is allowed, their sum would leave 64 bits.
  Profile profile = profile_of(1, 1, std::vector<Item>(2000, {kBytesMax, 0, 0}));
  expect_refused([&] { check_profile(profile); }, ErrorCode::kInvalidProfile, "2^53");
}

TEST(SortByUrgency, EarlierNeedThenLaterReadyThenAsGiven) {
  Profile profile = profile_of(10, 10, {{1, 5, 4}, {2, 9, 2}, {3, 9, 4}, {4, 5, 4}, {5, 1, 0}, {6, 9, 4}});
  sort_by_urgency(profile);
  std::vector<int64_t> order;
  for (const Tensor& tensor : profile.tensors) {
    order.push_back(tensor.bytes);
  }
  EXPECT_EQ(order, (std::vector<int64_t>{5, 2, 3, 6, 1, 4}));
}

}  // namespace
}  // namespace gradcast
