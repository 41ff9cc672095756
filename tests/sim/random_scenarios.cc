#include "tests/sim/random_scenarios.h"

#include <algorithm>
#include <iterator>
#include <sstream>
#include <vector>

#include "gradcast/error.h"
#include "gradcast/policy.h"
#include "tests/core/profiles.h"
#include "tests/engine/random_iterations.h"

namespace gradcast {
namespace {

using Kind = SimFault::Kind;

Profile draw_profile(Random& random) {
  using Windows = RandomProfileOptions::Windows;
  RandomProfileOptions options;
  options.windows = random.chance(0.5) ? Windows::kNested : random.chance(0.5) ? Windows::kDisturbed : Windows::kRandom;
  options.buffer_count = static_cast<int32_t>(random.integer(1, 3));
  options.link_piece_count = static_cast<int32_t>(random.integer(1, 2));
  options.updates = random.chance(0.5);
  options.pack_share = random.chance(0.5) ? 0 : 0.2;
  // p3 cuts into slices of 200 kB: larger tensors give it hundreds of blocks, which show nothing that a dozen do not.
  options.bytes_max = 2'000'000;
  return random_profile(static_cast<uint64_t>(random.integer(0, int64_t{1} << 40)), options);
}

Plan draw_policy_plan(Random& random, const Profile& profile) {
  PolicyOptions options;
  const PolicyInfo& info = policies()[static_cast<size_t>(random.integer(0, std::ssize(policies()) - 1))];
  options.policy = info.name;
  options.mode = info.overlap_only || random.chance(0.6) ? Mode::kOverlap : Mode::kHook;
  options.in_flight = static_cast<int32_t>(random.integer(1, 4));
  return make_plan(profile, profile.link, options);
}

Plan draw_plan(Random& random, const Profile& profile) {
  if (random.chance(0.5)) {
    return draw_policy_plan(random, profile);
  }
  Plan plan = random_followable(random, profile, random.chance(0.5));
  plan.mode = random.chance(0.5) ? Mode::kOverlap : Mode::kHook;
  return plan;
}

SimJitter draw_jitter(Random& random, const Profile& profile) {
  SimJitter jitter;
  const auto some = [&](double max) { return random.chance(0.4) ? 0 : random.log_uniform(1e-3, 1) * max; };
  jitter.compute_share = some(0.3);
  jitter.straggler_probability = some(0.5);
  jitter.straggler_factor_max = 1 + some(5);
  jitter.ready_ns_max = some(profile.backward_ns);
  jitter.link_share = some(1);
  jitter.completion_ns_max = some(0.3 * profile.backward_ns);
  jitter.late_probability = some(0.3);
  jitter.late_ns_max = some(5 * profile.backward_ns);
  return jitter;
}

int32_t draw_below(Random& random, int64_t count) {
  return static_cast<int32_t>(random.integer(0, count - 1));
}

// Somewhere in a run that nothing disturbs, or a little after its end.
double draw_leave_ns(Random& random, SimScenario scenario) {
  scenario.faults.clear();
  return random.uniform(0, 1.05) * simulate(scenario).end_ns;
}

SimFault draw_fault(Random& random, const SimScenario& scenario, Kind kind) {
  SimFault fault{kind, draw_below(random, scenario.rank_count), draw_below(random, scenario.iteration_count), 0, 0};
  if (kind == Kind::kLoseReady) {
    fault.subject = draw_below(random, std::ssize(scenario.profile.tensors));
  } else if (kind == Kind::kLeave) {
    fault.time_ns = draw_leave_ns(random, scenario);
  } else {
    fault.subject = draw_below(random, std::ssize(plan_in(scenario, fault.iteration).blocks));
  }
  return fault;
}

void draw_faults(Random& random, RandomScenario& drawn) {
  constexpr Kind kKinds[] = {Kind::kLoseReady, Kind::kLoseCompletion, Kind::kLeave};
  constexpr Trouble kTroubles[] = {Trouble::kLostReady, Trouble::kLostCompletion, Trouble::kLeave};
  if (random.chance(0.4)) {
    return;
  }
  const bool is_one = random.chance(0.8);
  for (int64_t count = is_one ? 1 : random.integer(2, 4); count > 0; --count) {
    const int32_t kind = draw_below(random, std::ssize(kKinds));
    drawn.scenario.faults.push_back(draw_fault(random, drawn.scenario, kKinds[kind]));
    drawn.trouble = is_one ? kTroubles[kind] : Trouble::kMany;
  }
}

}  // namespace

const Plan& plan_in(const SimScenario& scenario, int32_t iteration) {
  return scenario.plans[scenario.plan_in(iteration)];
}

RandomScenario random_scenario(uint64_t seed) {
  Random random(seed);
  RandomScenario drawn;
  SimScenario& scenario = drawn.scenario;
  scenario.seed = seed;
  scenario.keep_launches = true;
  scenario.profile = draw_profile(random);
  scenario.rank_count = static_cast<int32_t>(random.log_uniform(1, 33));
  scenario.iteration_count = static_cast<int32_t>(random.integer(1, 4));
  scenario.plans.push_back(draw_plan(random, scenario.profile));
  for (int32_t iteration = 1; iteration < scenario.iteration_count; ++iteration) {
    if (random.chance(0.4)) {
      scenario.plans.push_back(draw_plan(random, scenario.profile));
      scenario.changes.push_back({iteration, draw_below(random, std::ssize(scenario.plans))});
    }
  }
  if (random.chance(0.9)) {
    scenario.jitter = draw_jitter(random, scenario.profile);
  }
  draw_faults(random, drawn);
  return drawn;
}

std::string describe(const RandomScenario& random) {
  const SimScenario& scenario = random.scenario;
  std::ostringstream text;
  text << scenario.rank_count << " ranks, " << scenario.iteration_count << " iterations, "
       << scenario.profile.tensors.size() << " tensors";
  for (const Plan& plan : scenario.plans) {
    text << "; plan of " << plan.policy << ": " << plan.blocks.size() << " blocks, " << plan.in_flight << " in flight, "
         << to_string(plan.mode);
  }
  for (const SimPlanChange& change : scenario.changes) {
    text << "; plan " << change.plan << " from iteration " << change.iteration;
  }
  for (const SimFault& fault : scenario.faults) {
    constexpr const char* kNames[] = {"lose ready", "lose completion", "keep old plan", "leave"};
    text << "; " << kNames[static_cast<size_t>(fault.kind)] << ": rank " << fault.rank << ", iteration "
         << fault.iteration << ", subject " << fault.subject << ", time " << fault.time_ns;
  }
  return text.str();
}

}  // namespace gradcast
