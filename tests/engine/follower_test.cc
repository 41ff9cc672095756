// The follower: tables by hand, and random orders of events held against a naive reading of the rules.
#include "engine/follower.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "gradcast/error.h"
#include "tests/core/hand_profiles.h"
#include "tests/engine/random_iterations.h"
#include "tests/support/refusals.h"
#include "tests/support/seeds.h"

namespace gradcast {
namespace {

constexpr size_t kNoReadyHelps = std::numeric_limits<size_t>::max();

std::shared_ptr<const FollowedPlan> followed(const Profile& profile, const Plan& plan) {
  return std::make_shared<const FollowedPlan>(profile, plan);
}

// Three tensors of 4, 6 and 2 bytes, at 0, 4 and 10.
Profile three_tensors() {
  return profile_of(0, 0, {{4}, {6}, {2}});
}

Follower begun(const Profile& profile, const Plan& plan) {
  Follower follower;
  follower.begin(followed(profile, plan));
  return follower;
}

TEST(Follower, NothingStartsBeforeAnIterationIsOpen) {
  Follower follower;
  EXPECT_FALSE(follower.is_open());
  EXPECT_EQ(follower.next(), std::nullopt);
  EXPECT_EQ(follower.ready_missing_min(), kNoReadyHelps);
  EXPECT_FALSE(follower.is_in_flight(0));
}

TEST(Follower, ABlockStartsWhenAllItsTensorsAreReady) {
  Follower follower = begun(three_tensors(), plan_of({block_of({{2, 12}}), block_of({{0, 2}})}));
  EXPECT_EQ(follower.ready_missing_min(), 3U);
  follower.on_ready(2);
  follower.on_ready(0);
  EXPECT_EQ(follower.next(), std::nullopt);
  EXPECT_EQ(follower.ready_missing_min(), 1U);
  follower.on_ready(1);
  EXPECT_EQ(follower.next(), 0);
  EXPECT_TRUE(follower.is_in_flight(0));
}

TEST(Follower, BlocksStartInPlanOrderHoweverReadyTheLaterOnesAre) {
  Follower follower = begun(
      three_tensors(), plan_of({block_of({{10, 12}}), block_of({{4, 10}}), block_of({{0, 4}})}, Mode::kOverlap, 3));
  follower.on_ready(0);
  follower.on_ready(1);
  EXPECT_EQ(follower.next(), std::nullopt);
  follower.on_ready(2);
  EXPECT_EQ(follower.next(), 0);
  EXPECT_EQ(follower.next(), 1);
  EXPECT_EQ(follower.next(), 2);
  EXPECT_EQ(follower.next(), std::nullopt);
}

TEST(Follower, NoMoreBlocksAreInFlightThanThePlanSays) {
  Follower follower = begun(
      three_tensors(), plan_of({block_of({{10, 12}}), block_of({{4, 10}}), block_of({{0, 4}})}, Mode::kOverlap, 2));
  for (const int32_t tensor : {0, 1, 2}) {
    follower.on_ready(tensor);
  }
  EXPECT_EQ(follower.next(), 0);
  EXPECT_EQ(follower.next(), 1);
  EXPECT_EQ(follower.next(), std::nullopt);
  EXPECT_EQ(follower.in_flight_count(), 2);
  EXPECT_EQ(follower.ready_missing_min(), kNoReadyHelps);
  follower.on_finish(1);
  EXPECT_EQ(follower.next(), 2);
}

TEST(Follower, ATensorArrivesWithTheLastBlockThatTouchesIt) {
  Follower follower =
      begun(three_tensors(), plan_of({block_of({{0, 2}, {6, 12}}), block_of({{2, 6}})}, Mode::kHook, 2));
  for (const int32_t tensor : {0, 1, 2}) {
    follower.on_ready(tensor);
  }
  EXPECT_EQ(follower.next(), 0);
  EXPECT_EQ(follower.next(), 1);
  EXPECT_EQ(follower.on_finish(0), std::vector<int32_t>({2}));
  EXPECT_EQ(follower.on_finish(1), std::vector<int32_t>({0, 1}));
}

TEST(Follower, AGatherStartsAfterItsScatterAndOnlyThenTensorsArrive) {
  const Plan plan =
      plan_of({block_of({{0, 12}}, Op::kReduceScatter), block_of({{0, 12}}, Op::kAllGather)}, Mode::kOverlap, 2);
  Follower follower = begun(three_tensors(), plan);
  for (const int32_t tensor : {0, 1, 2}) {
    follower.on_ready(tensor);
  }
  EXPECT_EQ(follower.next(), 0);
  EXPECT_EQ(follower.next(), std::nullopt);
  EXPECT_EQ(follower.ready_missing_min(), kNoReadyHelps);
  EXPECT_TRUE(follower.on_finish(0).empty());
  EXPECT_EQ(follower.next(), 1);
  EXPECT_EQ(follower.on_finish(1), std::vector<int32_t>({0, 1, 2}));
}

TEST(Follower, ATensorIsQueuedWithTheLastBlockThatADeviceEnds) {
  Follower follower =
      begun(three_tensors(), plan_of({block_of({{0, 2}, {6, 12}}), block_of({{2, 6}})}, Mode::kHook, 2));
  for (const int32_t tensor : {0, 1, 2}) {
    follower.on_ready(tensor);
  }
  const auto progress = [&] {
    return std::vector<Progress>{follower.progress_of(0), follower.progress_of(1), follower.progress_of(2)};
  };
  const Progress travelling = Progress::kTravelling;
  const Progress queued = Progress::kQueued;
  const Progress arrived = Progress::kArrived;
  follower.next();
  follower.next();
  EXPECT_EQ(progress(), std::vector<Progress>({travelling, travelling, travelling}));
  follower.on_queued(0);
  follower.on_queued(0);
  EXPECT_EQ(progress(), std::vector<Progress>({travelling, travelling, queued}));
  EXPECT_FALSE(follower.all_queued());
  EXPECT_TRUE(follower.is_in_flight(0));
  EXPECT_EQ(follower.in_flight_count(), 2);
  EXPECT_TRUE(follower.on_finish(1).empty());  // it was never called queued
  EXPECT_EQ(progress(), std::vector<Progress>({queued, queued, queued}));
  EXPECT_TRUE(follower.all_queued());
  EXPECT_EQ(follower.on_finish(0), std::vector<int32_t>({0, 1, 2}));
  EXPECT_EQ(progress(), std::vector<Progress>({arrived, arrived, arrived}));
}

TEST(Follower, ATensorIsNotQueuedWithItsScatter) {
  const Plan plan =
      plan_of({block_of({{0, 12}}, Op::kReduceScatter), block_of({{0, 12}}, Op::kAllGather)}, Mode::kOverlap, 2);
  Follower follower = begun(three_tensors(), plan);
  for (const int32_t tensor : {0, 1, 2}) {
    follower.on_ready(tensor);
  }
  follower.next();
  follower.on_queued(0);
  EXPECT_EQ(follower.progress_of(1), Progress::kTravelling);
  EXPECT_EQ(follower.next(), std::nullopt) << "the sums are not there yet";
  follower.on_finish(0);
  follower.next();
  EXPECT_EQ(follower.progress_of(1), Progress::kTravelling);
  follower.on_queued(1);
  EXPECT_EQ(follower.progress_of(1), Progress::kQueued);
}

TEST(Follower, TheNextIterationStartsFromNothing) {
  const auto plan = followed(three_tensors(), plan_of({block_of({{0, 12}})}));
  Follower follower;
  for (int iteration = 0; iteration < 2; ++iteration) {
    follower.begin(plan);
    EXPECT_EQ(follower.ready_missing_min(), 3U);
    for (const int32_t tensor : {0, 1, 2}) {
      follower.on_ready(tensor);
    }
    EXPECT_EQ(follower.next(), 0);
    EXPECT_EQ(follower.on_finish(0).size(), 3U);
  }
}

TEST(Follower, SeveralBuffersHaveOffsetsOfTheirOwn) {
  // Buffer 0 holds tensors 0 and 2, buffer 1 tensor 1.
  const Profile profile = profile_of(0, 0, {{4, 0, 0, 0, 0}, {6, 0, 0, 0, 1}, {2, 0, 0, 0, 0}});
  const FollowedPlan plan(profile,
                          plan_of({block_of({{0, 4}}), block_of({{0, 6}}, Op::kAllReduce, 1), block_of({{4, 6}})}));
  EXPECT_EQ(plan.block_tensors, std::vector<std::vector<int32_t>>({{0}, {1}, {2}}));
}

TEST(Follower, RefusesAGatherOfOtherRangesThanOneScatter) {
  const Plan plan = plan_of({block_of({{0, 12}}, Op::kReduceScatter), block_of({{0, 6}}, Op::kAllGather),
                             block_of({{6, 12}}, Op::kAllGather)});
  check_plan(plan, three_tensors());
  expect_refused([&] { FollowedPlan(three_tensors(), plan); }, ErrorCode::kInvalidPlan,
                 "blocks[1] gathers other ranges");
}

// --- Random orders of events against the rules as they are written. ---

bool touches(const Block& block, int32_t buffer, Range tensor) {
  return block.buffer == buffer && std::ranges::any_of(block.ranges, [&](const Range& range) {
           return range.lo_bytes < tensor.hi_bytes && tensor.lo_bytes < range.hi_bytes;
         });
}

class Naive {
 public:
  Naive(const Profile& profile, const Plan& plan) : profile_(profile), plan_(plan) {
    std::vector<int64_t> ends(16, 0);
    for (const Tensor& tensor : profile.tensors) {
      ranges_.push_back({ends[tensor.buffer], ends[tensor.buffer] + tensor.bytes});
      ends[tensor.buffer] += tensor.bytes;
    }
  }

  bool touches_tensor(size_t block, size_t tensor) const {
    return touches(plan_.blocks[block], profile_.tensors[tensor].buffer, ranges_[tensor]);
  }

  size_t missing(size_t block, const std::vector<bool>& ready, const std::vector<bool>& finished) const {
    size_t missing = 0;
    if (plan_.blocks[block].op == Op::kAllGather) {
      for (size_t k = 0; k < block; ++k) {
        missing += plan_.blocks[k].op == Op::kReduceScatter && plan_.blocks[k].buffer == plan_.blocks[block].buffer &&
                           plan_.blocks[k].ranges == plan_.blocks[block].ranges && !finished[k]
                       ? 1
                       : 0;
      }
      return missing;
    }
    for (size_t i = 0; i < ready.size(); ++i) {
      missing += touches_tensor(block, i) && !ready[i] ? 1 : 0;
    }
    return missing;
  }

  // Whether none of the blocks that it waits for is missing here.
  bool has_all(size_t tensor, const std::vector<bool>& blocks) const {
    for (size_t k = 0; k < blocks.size(); ++k) {
      if (plan_.blocks[k].op != Op::kReduceScatter && touches_tensor(k, tensor) && !blocks[k]) {
        return false;
      }
    }
    return true;
  }

  Progress progress_of(size_t tensor, const std::vector<bool>& queued, const std::vector<bool>& finished) const {
    if (has_all(tensor, finished)) {
      return Progress::kArrived;
    }
    return has_all(tensor, queued) ? Progress::kQueued : Progress::kTravelling;
  }

 private:
  const Profile& profile_;
  const Plan& plan_;
  std::vector<Range> ranges_;
};

void play_random_events(Random& random, const Profile& profile, const Plan& plan, Follower& follower) {
  const Naive naive(profile, plan);
  const auto tensor_count = static_cast<int32_t>(profile.tensors.size());
  std::vector<int32_t> unready = random_order(random, tensor_count);
  std::vector<bool> ready(profile.tensors.size(), false);
  std::vector<bool> arrived(profile.tensors.size(), false);
  std::vector<bool> queued(plan.blocks.size(), false);  // or finished
  std::vector<bool> finished(plan.blocks.size(), false);
  std::vector<int32_t> in_flight;
  size_t started = 0;
  while (std::ranges::count(finished, true) < static_cast<int64_t>(finished.size())) {
    const bool is_startable = started < plan.blocks.size() && in_flight.size() < static_cast<size_t>(plan.in_flight) &&
                              naive.missing(started, ready, finished) == 0;
    if (const std::optional<int32_t> block = follower.next()) {
      ASSERT_TRUE(is_startable);
      ASSERT_EQ(*block, static_cast<int32_t>(started));
      in_flight.push_back(*block);
      ++started;
      continue;
    }
    ASSERT_FALSE(is_startable);
    const bool can_help = started < plan.blocks.size() && in_flight.size() < static_cast<size_t>(plan.in_flight) &&
                          plan.blocks[started].op != Op::kAllGather;
    ASSERT_EQ(follower.ready_missing_min(), can_help ? naive.missing(started, ready, finished) : kNoReadyHelps);
    ASSERT_TRUE(!unready.empty() || !in_flight.empty()) << "the follower stands still";
    if (in_flight.empty() || (!unready.empty() && random.chance(0.5))) {
      follower.on_ready(unready.back());
      ready[unready.back()] = true;
      unready.pop_back();
      continue;
    }
    const auto at = in_flight.begin() + random.integer(0, static_cast<int64_t>(in_flight.size()) - 1);
    const int32_t block = *at;
    queued[block] = true;
    if (random.chance(0.5)) {
      follower.on_queued(block);
      ASSERT_EQ(follower.all_queued(), std::ranges::all_of(in_flight, [&](int32_t each) { return queued[each]; }));
      for (size_t i = 0; i < arrived.size(); ++i) {
        ASSERT_EQ(follower.progress_of(static_cast<int32_t>(i)), naive.progress_of(i, queued, finished)) << i;
      }
      continue;
    }
    in_flight.erase(at);
    for (const int32_t tensor : follower.on_finish(block)) {
      ASSERT_FALSE(arrived[tensor]);
      arrived[tensor] = true;
    }
    finished[block] = true;
    for (size_t i = 0; i < arrived.size(); ++i) {
      ASSERT_EQ(arrived[i], naive.has_all(i, finished)) << "tensor " << i << " after block " << block;
      ASSERT_EQ(follower.progress_of(static_cast<int32_t>(i)), naive.progress_of(i, queued, finished)) << i;
    }
  }
  ASSERT_EQ(follower.next(), std::nullopt);
  ASSERT_EQ(follower.in_flight_count(), 0);
}

TEST(Follower, RandomEventsNeverBreakTheRules) {
  for (uint64_t seed = 1; seed <= seed_count(2000); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    const Profile profile = random_tensors(random);
    const Plan plan = random_followable(random, profile, random.chance(0.5));
    check_plan(plan, profile);
    Follower follower;
    const auto compiled = followed(profile, plan);
    for (int iteration = 0; iteration < 2; ++iteration) {
      follower.begin(compiled);
      play_random_events(random, profile, plan, follower);
      if (testing::Test::HasFatalFailure()) {
        return;
      }
    }
  }
}

}  // namespace
}  // namespace gradcast
