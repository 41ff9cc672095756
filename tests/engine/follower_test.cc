// The follower: tables by hand, and random orders of events held against a naive reading of the rules.
#include "engine/follower.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
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

TEST(Follower, NothingStartsBeforeAnIterationIsOpen) {
  Follower follower;
  EXPECT_FALSE(follower.is_open());
  EXPECT_EQ(follower.next(), std::nullopt);
  EXPECT_EQ(follower.ready_missing_min(), kNoReadyHelps);
  EXPECT_FALSE(follower.is_in_flight(0));
}

TEST(Follower, RefusesAGatherOfOtherRangesThanOneScatter) {
  const Plan plan = plan_of({block_of({{0, 12}}, Op::kReduceScatter), block_of({{0, 6}}, Op::kAllGather),
                             block_of({{6, 12}}, Op::kAllGather)});
  check_plan(plan, three_tensors());
  expect_refused([&] { FollowedPlan(three_tensors(), plan); }, ErrorCode::kInvalidPlan,
                 "blocks[1] gathers other ranges");
}

// --- Random orders of events against the rules as they are written. ---

// What has happened in an iteration, and what follows from it by the rules.
class Naive {
 public:
  Naive(const Profile& profile, const Plan& plan)
      : ready(profile.tensors.size()),
        queued(plan.blocks.size()),
        finished(plan.blocks.size()),
        profile_(profile),
        blocks_(plan.blocks) {
    std::vector<int64_t> ends(16, 0);
    for (const Tensor& tensor : profile.tensors) {
      ranges_.push_back({ends[tensor.buffer], ends[tensor.buffer] + tensor.bytes});
      ends[tensor.buffer] += tensor.bytes;
    }
  }

  // What the block still waits for: its gradients, or the scatter of its ranges.
  size_t missing(size_t block) const {
    size_t missing = 0;
    const bool gathers = blocks_[block].op == Op::kAllGather;
    for (size_t i = 0; !gathers && i < ready.size(); ++i) {
      missing += touches(block, i) && !ready[i] ? 1 : 0;
    }
    for (size_t k = 0; gathers && k < block; ++k) {
      const bool is_its_scatter = blocks_[k].op == Op::kReduceScatter && blocks_[k].buffer == blocks_[block].buffer &&
                                  blocks_[k].ranges == blocks_[block].ranges;
      missing += is_its_scatter && !finished[k] ? 1 : 0;
    }
    return missing;
  }

  Progress progress_of(size_t tensor) const {
    Progress progress = Progress::kArrived;
    for (size_t k = 0; k < blocks_.size(); ++k) {
      if (blocks_[k].op != Op::kReduceScatter && touches(k, tensor) && !finished[k]) {
        progress = std::min(progress, queued[k] ? Progress::kQueued : Progress::kTravelling);
      }
    }
    return progress;
  }

  std::vector<bool> ready;             // by tensor
  std::vector<bool> queued, finished;  // by block; a finished one is queued, too

 private:
  bool touches(size_t block, size_t tensor) const {
    const Range& place = ranges_[tensor];
    return blocks_[block].buffer == profile_.tensors[tensor].buffer &&
           std::ranges::any_of(blocks_[block].ranges, [&](const Range& range) {
             return range.lo_bytes < place.hi_bytes && place.lo_bytes < range.hi_bytes;
           });
  }

  const Profile& profile_;
  const std::vector<Block>& blocks_;
  std::vector<Range> ranges_;  // by tensor
};

void play_random_events(Random& random, const Profile& profile, const Plan& plan, int32_t window, Follower& follower) {
  Naive naive(profile, plan);
  std::vector<int32_t> unready = random_order(random, static_cast<int32_t>(profile.tensors.size()));
  std::vector<bool> arrived(profile.tensors.size(), false);
  std::vector<int32_t> in_flight;
  size_t started = 0;
  while (std::ranges::count(naive.finished, true) < std::ssize(naive.finished)) {
    const auto unqueued = std::ranges::count_if(in_flight, [&](int32_t each) { return !naive.queued[each]; });
    const bool has_room = started < plan.blocks.size() && unqueued < plan.in_flight &&
                          std::ssize(in_flight) < std::max(plan.in_flight, window);
    const bool is_startable = has_room && naive.missing(started) == 0;
    if (const std::optional<int32_t> block = follower.next()) {
      ASSERT_TRUE(is_startable);
      ASSERT_EQ(*block, static_cast<int32_t>(started));
      in_flight.push_back(*block);
      ++started;
      continue;
    }
    ASSERT_FALSE(is_startable);
    const bool can_help = has_room && plan.blocks[started].op != Op::kAllGather;
    ASSERT_EQ(follower.ready_missing_min(), can_help ? naive.missing(started) : kNoReadyHelps);
    ASSERT_TRUE(!unready.empty() || !in_flight.empty()) << "the follower stands still";
    if (in_flight.empty() || (!unready.empty() && random.chance(0.5))) {
      follower.on_ready(unready.back());
      naive.ready[unready.back()] = true;
      unready.pop_back();
      continue;
    }
    const auto at = in_flight.begin() + random.integer(0, std::ssize(in_flight) - 1);
    const int32_t block = *at;
    naive.queued[block] = true;
    if (random.chance(0.5)) {
      follower.on_queued(block);
      ASSERT_EQ(follower.all_queued(),
                std::ranges::all_of(in_flight, [&](int32_t each) { return bool{naive.queued[each]}; }));
    } else {
      in_flight.erase(at);
      naive.finished[block] = true;
      for (const int32_t tensor : follower.on_finish(block)) {
        ASSERT_FALSE(arrived[tensor]);
        arrived[tensor] = true;
      }
    }
    for (size_t i = 0; i < arrived.size(); ++i) {
      const Progress progress = naive.progress_of(i);
      ASSERT_EQ(arrived[i], progress == Progress::kArrived) << "tensor " << i << " after block " << block;
      ASSERT_EQ(follower.progress_of(static_cast<int32_t>(i)), progress) << i;
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
    const auto window = static_cast<int32_t>(random.integer(1, 4));
    Follower follower(window);
    const auto compiled = followed(profile, plan);
    for (int iteration = 0; iteration < 2; ++iteration) {
      follower.begin(compiled);
      play_random_events(random, profile, plan, window, follower);
      if (testing::Test::HasFatalFailure()) {
        return;
      }
    }
  }
}

}  // namespace
}  // namespace gradcast
