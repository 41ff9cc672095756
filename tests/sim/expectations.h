// What must come of a random scenario, said without a look at the simulator: from its plans and its trouble alone.
//
// Thread safety: pure; any thread.
#pragma once

#include "tests/sim/random_scenarios.h"
#include "tests/sim/simulator/simulate.h"

namespace gradcast {

// Fails the running test where the result is another one.
void expect_what_must_come(const RandomScenario& random, const SimResult& result);

}  // namespace gradcast
