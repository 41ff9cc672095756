// A scenario from a seed: ranks, profile, plans of any policy or of none, plan changes, jitter, and one thing that goes
// wrong.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <string>

#include "tests/sim/simulator/simulate.h"

namespace gradcast {

// What goes wrong. One thing alone, so that what must come of it can be said exactly; kMany is the exception.
enum class Trouble { kNone, kLostReady, kLostCompletion, kLeave, kMany };

struct RandomScenario {
  SimScenario scenario;
  Trouble trouble = Trouble::kNone;
};

// The same seed gives the same scenario everywhere.
RandomScenario random_scenario(uint64_t seed);

// The plan on which ranks agree for an iteration.
const Plan& plan_in(const SimScenario& scenario, int32_t iteration);

// For a failing test: the whole scenario in a few lines.
std::string describe(const RandomScenario& random);

}  // namespace gradcast
