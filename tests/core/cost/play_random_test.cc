// play() on random plans: against a second, plain reading of the definition, and monotone.
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include "gradcast/play.h"
#include "tests/core/hand_profiles.h"
#include "tests/core/profiles.h"
#include "tests/core/random_plans.h"

namespace gradcast {
namespace {

// A second reading of the definition: byte ranges compared one by one, nothing shared with csrc/core but the value
// types.
struct Reference {
  std::vector<double> finish_ns;
  std::vector<double> launch_ns;
  std::vector<double> bytes_begin_ns;
  std::vector<double> arrival_ns;
  double iteration_ns = 0;
};

double updates_ns(const Profile& profile) {
  double sum_ns = 0;
  for (const Tensor& tensor : profile.tensors) {
    sum_ns += tensor.update_ns;
  }
  return sum_ns;
}

bool touches(const Profile& profile, const Block& block, size_t tensor) {
  int64_t lo_bytes = 0;
  for (size_t i = 0; i < tensor; ++i) {
    lo_bytes += profile.tensors[i].buffer == profile.tensors[tensor].buffer ? profile.tensors[i].bytes : 0;
  }
  const Range range{lo_bytes, lo_bytes + profile.tensors[tensor].bytes};
  return detail::share_a_byte(block, block_of({range}, Op::kAllReduce, profile.tensors[tensor].buffer));
}

const LinkPiece& piece_of(const LinkModel& link, const Block& block) {
  const OpCost& cost = block.op == Op::kAllReduce       ? link.all_reduce
                       : block.op == Op::kReduceScatter ? link.reduce_scatter
                                                        : link.all_gather;
  size_t p = 0;
  while (block.size_bytes() > cost.pieces[p].up_to_bytes) {
    ++p;
  }
  return cost.pieces[p];
}

Reference reference_play(const Profile& profile, const LinkModel& link, const Plan& plan) {
  Reference reference;
  reference.arrival_ns.assign(profile.tensors.size(), 0);
  for (size_t k = 0; k < plan.blocks.size(); ++k) {
    const Block& block = plan.blocks[k];
    double launch_ns = k > 0 ? reference.launch_ns[k - 1] : 0;
    if (k >= static_cast<size_t>(plan.in_flight)) {
      launch_ns = std::max(launch_ns, reference.finish_ns[k - plan.in_flight]);
    }
    for (size_t j = 0; j < k && block.op == Op::kAllGather; ++j) {
      if (plan.blocks[j].op == Op::kReduceScatter && detail::share_a_byte(plan.blocks[j], block)) {
        launch_ns = std::max(launch_ns, reference.finish_ns[j]);
      }
    }
    for (size_t i = 0; i < profile.tensors.size() && block.op != Op::kAllGather; ++i) {
      launch_ns = touches(profile, block, i) ? std::max(launch_ns, profile.tensors[i].ready_ns) : launch_ns;
    }
    const LinkPiece& piece = piece_of(link, block);
    const double rate = piece.beta_ns_per_byte + (block.ranges.size() > 1 ? link.pack_ns_per_byte : 0);
    const double bytes_begin_ns = std::max(launch_ns + piece.alpha_ns, k > 0 ? reference.finish_ns[k - 1] : 0);
    reference.launch_ns.push_back(launch_ns);
    reference.bytes_begin_ns.push_back(bytes_begin_ns);
    reference.finish_ns.push_back(bytes_begin_ns + rate * static_cast<double>(block.size_bytes()));
    for (size_t i = 0; i < profile.tensors.size() && block.op != Op::kReduceScatter; ++i) {
      if (touches(profile, block, i)) {
        reference.arrival_ns[i] = std::max(reference.arrival_ns[i], reference.finish_ns.back());
      }
    }
  }
  if (plan.mode == Mode::kHook) {
    const double last_ns = *std::max_element(reference.finish_ns.begin(), reference.finish_ns.end());
    reference.iteration_ns = std::max(profile.backward_ns, last_ns) + updates_ns(profile) + profile.forward_ns;
    return reference;
  }
  double clock_ns = profile.backward_ns;
  double last_need_ns = 0;
  for (size_t i = 0; i < profile.tensors.size(); ++i) {
    const Tensor& tensor = profile.tensors[i];
    clock_ns = std::max(clock_ns + (tensor.need_ns - last_need_ns), reference.arrival_ns[i]) + tensor.update_ns;
    last_need_ns = tensor.need_ns;
  }
  reference.iteration_ns = clock_ns + (profile.forward_ns - last_need_ns);
  return reference;
}

// The iteration time as planner.md's formula has it: max(B + F, max over tensors of arrival + F - q).
double formula_ns(const Profile& profile, const Plan& plan, const Reference& reference) {
  const double forward_ns = profile.forward_ns + updates_ns(profile);
  double iteration_ns = profile.backward_ns + forward_ns;
  double updates_before_ns = 0;
  for (size_t i = 0; i < profile.tensors.size(); ++i) {
    const double need_ns = plan.mode == Mode::kHook ? 0 : profile.tensors[i].need_ns + updates_before_ns;
    iteration_ns = std::max(iteration_ns, reference.arrival_ns[i] + forward_ns - need_ns);
    updates_before_ns += profile.tensors[i].update_ns;
  }
  return iteration_ns;
}

void expect_as_reference(const Profile& profile, const Plan& plan) {
  const Timeline timeline = play(profile, profile.link, plan);
  const Reference reference = reference_play(profile, profile.link, plan);
  const double tolerance_ns = 1e-9 * reference.iteration_ns;
  EXPECT_NEAR(timeline.iteration_ns, reference.iteration_ns, tolerance_ns);
  EXPECT_NEAR(formula_ns(profile, plan, reference), reference.iteration_ns, tolerance_ns);
  const double compute_ns = profile.backward_ns + profile.forward_ns + updates_ns(profile);
  EXPECT_NEAR(timeline.exposed_ns, reference.iteration_ns - compute_ns, tolerance_ns);
  EXPECT_GE(timeline.exposed_ns, -tolerance_ns);
  for (size_t k = 0; k < plan.blocks.size(); ++k) {
    ASSERT_NEAR(timeline.blocks[k].launch_ns, reference.launch_ns[k], tolerance_ns) << "block " << k;
    ASSERT_NEAR(timeline.blocks[k].finish_ns, reference.finish_ns[k], tolerance_ns) << "block " << k;
    ASSERT_LE(timeline.blocks[k].ready_ns, timeline.blocks[k].launch_ns) << "block " << k;
    // One wire: no block's bytes before those of the last one have passed.
    ASSERT_TRUE(k == 0 || reference.bytes_begin_ns[k] >= reference.finish_ns[k - 1]);
  }
  double waits_ns = 0;
  for (size_t i = 0; i < profile.tensors.size(); ++i) {
    ASSERT_NEAR(timeline.tensors[i].arrival_ns, reference.arrival_ns[i], tolerance_ns) << "tensor " << i;
    ASSERT_GE(timeline.tensors[i].wait_ns, 0);
    waits_ns += timeline.tensors[i].wait_ns;
  }
  // Overlap mode: what is exposed is what forward waits, and forward waits for nothing else.
  EXPECT_NEAR(plan.mode == Mode::kOverlap ? waits_ns : timeline.exposed_ns, timeline.exposed_ns, tolerance_ns);
  EXPECT_EQ(plan.mode == Mode::kHook ? waits_ns : 0, 0);
}

TEST(PlayRandomly, RandomPlansAreAsTheReferenceHasThem) {
  using Windows = RandomProfileOptions::Windows;
  const RandomProfileOptions kinds[] = {{.windows = Windows::kDisturbed, .updates = true},
                                        {.windows = Windows::kRandom, .buffer_count = 3, .link_piece_count = 3},
                                        {.updates = true},
                                        {.windows = Windows::kRandom, .buffer_count = 2, .link_piece_count = 4}};
  for (size_t kind = 0; kind < std::size(kinds); ++kind) {
    for (uint64_t seed = 1; seed <= 700; ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed) + " kind " + std::to_string(kind));
      Random random(seed);
      Profile profile = random_profile(seed, kinds[kind]);
      profile.link.pack_ns_per_byte = random.chance(0.5) ? 0.3 * profile.link.all_reduce.pieces[0].beta_ns_per_byte : 0;
      RandomPlanOptions options;
      options.mode = random.chance(0.7) ? Mode::kOverlap : Mode::kHook;
      options.in_flight = static_cast<int32_t>(random.integer(1, 4));
      options.scatter_gather = kind >= 2;
      const Plan plan = random_plan(random, profile, options);
      ASSERT_NO_THROW(check_plan(plan, profile));
      expect_as_reference(profile, plan);
    }
  }
}

// Whatever gets faster, no plan gets slower: the reason why a plan that meets its deadlines on paper meets them when
// some of its tensors are early.
TEST(PlayRandomly, IsMonotone) {
  RandomProfileOptions profile_options;
  profile_options.windows = RandomProfileOptions::Windows::kRandom;
  profile_options.updates = true;
  for (uint64_t seed = 1; seed <= 500; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    const Profile profile = random_profile(seed, profile_options);
    RandomPlanOptions options;
    options.scatter_gather = true;
    options.mode = random.chance(0.7) ? Mode::kOverlap : Mode::kHook;
    options.in_flight = static_cast<int32_t>(random.integer(1, 3));
    const Plan plan = random_plan(random, profile, options);
    const double before_ns = play(profile, profile.link, plan).iteration_ns;
    const double allowed_ns = before_ns * (1 + 1e-12);

    Plan wider = plan;
    ++wider.in_flight;
    EXPECT_LE(play(profile, profile.link, wider).iteration_ns, allowed_ns);
    EXPECT_LE(play(profile, scaled(profile.link, 0.7, 1), plan).iteration_ns, allowed_ns);
    EXPECT_LE(play(profile, scaled(profile.link, 1, 0.7), plan).iteration_ns, allowed_ns);
    Profile earlier = profile;
    const auto moved = static_cast<size_t>(random.integer(0, static_cast<int64_t>(profile.tensors.size()) - 1));
    earlier.tensors[moved].ready_ns *= 0.5;
    EXPECT_LE(play(earlier, profile.link, plan).iteration_ns, allowed_ns);
  }
}

}  // namespace
}  // namespace gradcast
