// dear: groups, order of the two halves, and its tuner. Blocks are worked out by hand.
#include "policies/dear.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "tests/core/policies/policy_cases.h"
#include "tests/core/profiles.h"

namespace gradcast {
namespace {

TEST(Dear, ScattersAsGroupsCompleteAndGathersInForwardOrder) {
  const std::vector<Item> rows = {{2, 4}, {2, 3}, {3, 2}, {9, 1}, {1, 0}};
  // A group may reach the size, not exceed it; a larger tensor is alone.
  EXPECT_EQ(shown(dear(problem_of(rows), {.fusion_bytes = 4})),
            (Shown{"rs 0:[16,17)", "rs 0:[7,16)", "rs 0:[4,7)", "rs 0:[0,4)", "ag 0:[0,4)", "ag 0:[4,7)", "ag 0:[7,16)",
                   "ag 0:[16,17)"}));
  EXPECT_EQ(shown(dear(problem_of(rows), {.fusion_bytes = 17})), (Shown{"rs 0:[0,17)", "ag 0:[0,17)"}));
}

TEST(Dear, AGroupIsReadyWithItsLastTensor) {
  // The first group waits for tensor 0, which is ready after all others.
  EXPECT_EQ(shown(dear(problem_of({{1, 9}, {1, 1}, {1, 3}, {1, 2}}), {.fusion_bytes = 2})),
            (Shown{"rs 0:[2,4)", "rs 0:[0,2)", "ag 0:[0,2)", "ag 0:[2,4)"}));
  // Ready together: the less urgent first.
  EXPECT_EQ(shown(dear(problem_of({{1, 5}, {1, 5}}), {.fusion_bytes = 1})),
            (Shown{"rs 0:[1,2)", "rs 0:[0,1)", "ag 0:[0,1)", "ag 0:[1,2)"}));
}

TEST(Dear, GroupsStayInTheirBuffer) {
  EXPECT_EQ(shown(dear(problem_of({{1, 4, 0, 0, 1}, {1, 3, 0, 0, 0}, {1, 2, 0, 0, 1}, {1, 1, 0, 0, 0}}),
                       {.fusion_bytes = 2})),
            (Shown{"rs 0:[0,2)", "rs 1:[0,2)", "ag 1:[0,2)", "ag 0:[0,2)"}));
}

TEST(Dear, TheTunerTakesTheBestFusion) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Profile profile =
        random_profile(seed, {.tensor_count_min = 20, .tensor_count_max = 40, .bytes_min = 100'000});
    const Problem problem = make_problem(profile, profile.link, Mode::kOverlap, 1);
    double best_ns = std::numeric_limits<double>::infinity();
    for (const int64_t fusion_mib : {1, 2, 4, 8, 16, 25, 32, 64, 128, 256}) {
      best_ns = std::min(best_ns, iteration_ns(problem, dear(problem, {.fusion_bytes = fusion_mib << 20})));
    }
    EXPECT_NEAR(iteration_ns(problem, dear(problem, {})), best_ns, 1e-12 * best_ns);
  }
}

}  // namespace
}  // namespace gradcast
