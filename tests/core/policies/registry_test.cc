// The registry: what every policy owes on any profile, and what users read when they ask for what does not exist.
#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <string>
#include <vector>

#include "gradcast/play.h"
#include "gradcast/policy.h"
#include "planner/window_chains.h"
#include "tests/core/policies/policy_cases.h"
#include "tests/core/profiles.h"
#include "tests/support/refusals.h"

namespace gradcast {
namespace {

using Windows = RandomProfileOptions::Windows;

TEST(Policies, ForecastFirstThenByPublication) {
  std::vector<std::string> names;
  for (const PolicyInfo& info : policies()) {
    names.push_back(info.name);
    EXPECT_FALSE(info.summary.empty() || info.source.empty()) << info.name;
    EXPECT_EQ(info.overlap_only, info.name == "dear");
    EXPECT_EQ(info.needs_scatter_gather, info.name == "dear");
  }
  EXPECT_EQ(names, (std::vector<std::string>{"forecast", "fifo", "mgwfbp", "p3", "bytescheduler", "ddp", "prophet",
                                             "dear", "usbyte", "dcredit", "fsdp"}));
  EXPECT_EQ(names.front(), kDefaultPolicy);
}

// A plan that names its defaults is the plan without them: each parameter reaches its own field.
TEST(Policies, NamingTheDefaultsChangesNothing) {
  const Profile profile = random_profile(3, {.tensor_count_min = 12, .buffer_count = 2});
  for (const PolicyInfo& info : policies()) {
    SCOPED_TRACE(info.name);
    PolicyOptions named{.policy = info.name};
    for (const PolicyParameter& parameter : info.parameters) {
      named.parameters[parameter.name] = parameter.default_value;
    }
    EXPECT_EQ(make_plan(profile, profile.link, named), make_plan(profile, profile.link, {.policy = info.name}));
  }
}

TEST(MakePlan, ParametersReachThePolicy) {
  const Profile profile = profile_of({{2, 4}, {3, 3}, {1, 2}, {1, 1}});
  const auto blocks = [&](PolicyOptions options) { return shown(make_plan(profile, profile.link, options).blocks); };
  EXPECT_EQ(blocks({.policy = "ddp", .parameters = {{"first_bytes", 1}, {"cap_bytes", 4}}}),
            (Shown{"0:[6,7)", "0:[2,6)", "0:[0,2)"}));
  EXPECT_EQ(blocks({.policy = "ddp", .parameters = {{"first_bytes", 3}}}), (Shown{"0:[2,7)", "0:[0,2)"}));
  EXPECT_EQ(blocks({.policy = "dear", .parameters = {{"fusion_bytes", 7}}}), (Shown{"rs 0:[0,7)", "ag 0:[0,7)"}));
}

// A policy that tunes a size by itself is as fast as the best of the values that it tries.
TEST(MakePlan, TunersTakeTheBestValue) {
  struct Tuner {
    const char* policy;
    const char* parameter;
    std::vector<double> values;
    std::map<std::string, double> others = {};
  };
  constexpr double kMiB = 1 << 20;
  std::vector<Tuner> tuners = {
      {"prophet", "credit_bytes", {1, 1e6, 4e6, 16e6, 64e6}},
      {"dcredit", "unit_bytes", {250e3, 1e6, 4e6, 16e6}},
      {"usbyte", "unit_bytes", {250e3, 1e6, 4e6, 16e6}, {{"search", 0}}},
      {"dear",
       "fusion_bytes",
       {kMiB, 2 * kMiB, 4 * kMiB, 8 * kMiB, 16 * kMiB, 25 * kMiB, 32 * kMiB, 64 * kMiB, 128 * kMiB, 256 * kMiB}}};
  for (const double partition_bytes : {4e6, 8e6, 16e6, 32e6, 64e6, 128e6}) {
    tuners.push_back(
        {"bytescheduler", "credit_bytes", {16e6, 32e6, 64e6, 128e6, 256e6}, {{"partition_bytes", partition_bytes}}});
  }
  for (uint64_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Profile profile =
        random_profile(seed, {.tensor_count_min = 20, .tensor_count_max = 40, .bytes_min = 100'000});
    const auto time_ns = [&](const char* policy, const std::map<std::string, double>& parameters) {
      return make_plan(profile, profile.link, {.policy = policy, .parameters = parameters}).predicted_ns;
    };
    double best_of_bytescheduler_ns = std::numeric_limits<double>::infinity();
    for (const Tuner& tuner : tuners) {
      double best_ns = std::numeric_limits<double>::infinity();
      std::map<std::string, double> parameters = tuner.others;
      for (const double value : tuner.values) {
        parameters[tuner.parameter] = value;
        best_ns = std::min(best_ns, time_ns(tuner.policy, parameters));
      }
      EXPECT_NEAR(time_ns(tuner.policy, tuner.others), best_ns, 1e-12 * best_ns) << tuner.policy;
      if (std::string(tuner.policy) == "bytescheduler") {
        best_of_bytescheduler_ns = std::min(best_of_bytescheduler_ns, best_ns);
      }
    }
    EXPECT_NEAR(time_ns("bytescheduler", {}), best_of_bytescheduler_ns, 1e-12 * best_of_bytescheduler_ns);
  }
}

// A plan of a million operations is refused with the parameter to raise; a tuner avoids such sizes.
TEST(MakePlan, RefusesAMillionBlocks) {
  const Profile profile = profile_of({{2'000'002, 0}});
  const std::map<std::string, std::string> sizes = {
      {"p3", "slice_elements"}, {"bytescheduler", "partition_bytes"}, {"prophet", "partition_bytes"}};
  for (const auto& [policy, parameter] : sizes) {
    const PolicyOptions options{.policy = policy, .parameters = {{parameter, 2}}};
    expect_refused([&] { make_plan(profile, profile.link, options); }, ErrorCode::kInvalidOption,
                   std::string("the plan would have 1000001 blocks, above the limit of 1000000; raise ") + parameter);
  }
  const Profile huge = profile_of({{10'000'000'000'000, 0}});  // 2.5 million chunks of 4 MB
  EXPECT_LE(make_plan(huge, huge.link, {.policy = "bytescheduler"}).blocks.size(), 1'000'000u);
}

// What every policy owes on every profile. make_plan itself checks that each byte travels once.
void expect_sound(const Profile& profile, const PolicyOptions& options) {
  SCOPED_TRACE(options.policy + (options.mode == Mode::kHook ? ", hook" : ", overlap") + ", in_flight " +
               std::to_string(options.in_flight));
  const Plan plan = make_plan(profile, profile.link, options);
  EXPECT_NO_THROW(check_plan(plan, profile));
  EXPECT_EQ(plan.policy, options.policy);
  EXPECT_EQ(plan.mode, options.mode);
  EXPECT_EQ(plan.in_flight, options.in_flight);

  const Timeline timeline = play(profile, profile.link, plan);
  EXPECT_EQ(plan.predicted_ns, timeline.iteration_ns);
  for (size_t k = 0; k < plan.blocks.size(); ++k) {
    EXPECT_EQ(plan.blocks[k].start_ns, timeline.blocks[k].launch_ns);
    EXPECT_EQ(plan.blocks[k].finish_ns, timeline.blocks[k].finish_ns);
    EXPECT_FALSE(plan.blocks[k].reason.empty());
  }
  EXPECT_GE(plan.bound_ns, plan.plain_bound_ns);
  EXPECT_GE(plan.predicted_ns, plan.bound_ns * (1 - 1e-9) - static_cast<double>(plan.blocks.size()));
  EXPECT_EQ(plan, make_plan(profile, profile.link, options)) << "not a pure function";
}

void expect_all_sound(uint64_t seed, const RandomProfileOptions& random) {
  const Profile profile = random_profile(seed, random);
  SCOPED_TRACE("seed " + std::to_string(seed));
  for (const PolicyInfo& info : policies()) {
    for (const Mode mode : {Mode::kOverlap, Mode::kHook}) {
      if (mode == Mode::kHook && info.overlap_only) {
        continue;
      }
      PolicyOptions options{.policy = info.name, .mode = mode, .in_flight = static_cast<int32_t>(1 + seed % 3)};
      if (info.name == kDefaultPolicy) {
        if (random.link_piece_count > 1) {
          continue;  // where small blocks are free, its plan can have half a million of them; it has tests of its own
        }
        options.parameters["effort"] = 0;
      }
      expect_sound(profile, options);
    }
  }
}

TEST(MakePlan, EveryPolicyIsSoundOnEveryProfile) {
  for (uint64_t seed = 0; seed < 300 && !testing::Test::HasFailure(); ++seed) {
    const int32_t larger = seed % 25 == 0 ? 100 : 0;
    expect_all_sound(seed, {.windows = static_cast<Windows>(seed / 3 % 3),
                            .tensor_count_min = 1 + larger,
                            .tensor_count_max = 12 + 3 * larger,
                            .buffer_count = static_cast<int32_t>(1 + seed / 9 % 3),
                            .link_piece_count = static_cast<int32_t>(1 + seed / 27 % 3),
                            .pack_share = seed % 5 == 0 ? 0.5 : 0,
                            .updates = seed % 2 == 0});
  }
}

// Free bytes, free start-ups, a free network, and one tensor.
TEST(MakePlan, EveryPolicyIsSoundAtTheEdges) {
  for (const double alpha_ns : {0.0, 1.0, 1e6}) {
    for (const double beta : {0.0, 1.0}) {
      for (const std::vector<Item>& rows : {std::vector<Item>{{1, 0}}, std::vector<Item>{{5, 0}, {5, 0}, {5, 0}},
                                            std::vector<Item>{{7, 100, 0}, {5, 50, 50}, {3, 0, 100, 0, 1}}}) {
        const Profile profile = profile_of(rows, {.alpha_ns = alpha_ns, .beta_ns_per_byte = beta});
        for (const PolicyInfo& info : policies()) {
          expect_sound(profile, {.policy = info.name});
        }
      }
    }
  }
}

TEST(MakePlan, BoundsCountAllKindsOnlyForPlansThatUseThem) {
  Profile profile = profile_of({{50, 100}, {50, 50}}, {.alpha_ns = 10});
  profile.link.reduce_scatter = profile.link.all_gather = linear_cost({0, 0.1});  // halves far below an all-reduce
  const Problem problem = make_problem(profile, profile.link, Mode::kOverlap, 1);
  EXPECT_EQ(make_plan(profile, profile.link, {.policy = "dear"}).bound_ns, bound(problem, true).best_ns);
  EXPECT_EQ(make_plan(profile, profile.link, {.policy = "fifo"}).bound_ns, bound(problem, false).best_ns);
  EXPECT_LT(bound(problem, true).best_ns, bound(problem, false).best_ns);
}

struct Refusal {
  PolicyOptions options;
  const char* message;
  ErrorCode code = ErrorCode::kInvalidOption;
};

TEST(MakePlan, RefusesInASentence) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Refusal refusals[] = {
      {{.policy = "fofo"},
       "there is no policy \"fofo\"; the policies are forecast, fifo, mgwfbp, p3, bytescheduler, ddp, prophet, dear, "
       "usbyte, dcredit, fsdp"},
      {{.policy = "ddp", .parameters = {{"cap_mb", 25}}},
       "policy ddp has no parameter \"cap_mb\"; it has first_bytes, cap_bytes"},
      {{.policy = "fifo", .parameters = {{"cap_bytes", 25}}},
       "policy fifo has no parameter \"cap_bytes\"; it has none at all, omit it"},
      {{.policy = "p3", .parameters = {{"slice_elements", nan}}},
       "parameter slice_elements of policy p3 is nan; it must be a whole number from 1 to 2^53"},
      {{.policy = "p3", .parameters = {{"slice_elements", 0}}},
       "parameter slice_elements of policy p3 is 0; it must be a whole number from 1 to 2^53"},
      {{.policy = "dear", .parameters = {{"fusion_bytes", -1}}},
       "parameter fusion_bytes of policy dear is -1; it must be a whole number from 0 to 2^53"},
      {{.policy = "dear", .parameters = {{"fusion_bytes", 1.5}}},
       "parameter fusion_bytes of policy dear is 1.5; it must be a whole number from 0 to 2^53"},
      {{.policy = "usbyte", .parameters = {{"search", 2}}},
       "parameter search of policy usbyte is 2; it must be a whole number from 0 to 1"},
      {{.policy = "prophet", .parameters = {{"gap_factor", std::numeric_limits<double>::infinity()}}},
       "parameter gap_factor of policy prophet is inf; it must be a number from 0 to 1000000"},
      {{.policy = "dear", .mode = Mode::kHook},
       "policy dear works in overlap mode only, since half of its traffic runs under forward"},
      {{.policy = "fifo", .in_flight = 0}, "in_flight is 0; at least one block must be in flight"},
      {{.policy = "dear"},
       "policy dear needs link.all_gather, which is missing; add its cost",
       ErrorCode::kInvalidLink},
  };
  Profile profile = profile_of({{4, 1}});
  profile.link.all_gather = {};
  for (const Refusal& refusal : refusals) {
    expect_refused([&] { make_plan(profile, profile.link, refusal.options); }, refusal.code, refusal.message);
  }
}

}  // namespace
}  // namespace gradcast
