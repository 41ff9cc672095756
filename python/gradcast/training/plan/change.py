"""Why a plan is made again in mid-training, in one sentence, and for how long it then is not made again."""

import dataclasses

from gradcast import _core
from gradcast.errors import Error
from gradcast.training.plan.agreement import Agreed

# Where measuring again has found and gained nothing, it is not done again so soon: each time twice as long.
_HOLD_ITERATIONS = 64
_HOLD_ITERATIONS_MAX = 4096
_NEW_PLAN_GAIN = 1.02
_REAL_CHANGE = 0.05  # of the predicted step


@dataclasses.dataclass(frozen=True)
class PlanChange:
    change: _core.Change
    before: Agreed

    def sentence(self, now: Agreed) -> str:
        times = f"{self.change.before_ns / 1e6:.1f} ms per step, now {self.change.after_ns / 1e6:.1f}"
        if self.change.cause == "network":
            what = f"the network has changed: it was busy for {times}"
        elif self.change.rank >= 0:
            what = f"rank {self.change.rank} has changed: the slowest rank computed {times}"
        else:
            what = f"compute has changed on most ranks: the slowest one computed {times}"
        return (
            f"{what}; planned again: {now.usual.step_ns / 1e6:.1f} ms per step predicted, "
            f"{self.before.usual.step_ns / 1e6:.1f} before"
        )

    def hold_iterations(self, profile: _core.Profile, plan: _core.Plan) -> int:
        """How long not to measure again: where nothing had changed after all, longer each time."""
        old = self.before.plan
        if abs(plan.predicted_ns / self.before.in_force.predicted_ns - 1) > _REAL_CHANGE:
            return 0
        try:
            old.check(profile)
        except Error:
            return 0
        if _core.play(profile, profile.link, old).iteration_ns > _NEW_PLAN_GAIN * plan.predicted_ns:
            return 0
        return min(_HOLD_ITERATIONS_MAX, max(_HOLD_ITERATIONS, 2 * self.before.hold_iterations))
