"""Why a plan is made again during training, and how long the next change is then ignored."""

import dataclasses

from gradcast import _core
from gradcast.comparison.compare import NOTICEABLE_GAIN
from gradcast.errors import Error
from gradcast.training.plan.agreement import AgreedPlan

# If measuring again has gained nothing, the next changes are ignored for so many iterations, doubled each time.
_HOLD_ITERATIONS = 64
_HOLD_ITERATIONS_MAX = 4096
_REAL_CHANGE = 0.05  # share of the predicted step


@dataclasses.dataclass(frozen=True)
class PlanChange:
    """A change that the monitor has found, and the plan in force at that time."""

    change: _core.Change
    before: AgreedPlan

    def sentence(self, now: AgreedPlan) -> str:
        times = f"{self.change.before_ns / 1e6:.1f} ms per step, now {self.change.after_ns / 1e6:.1f}"
        if self.change.cause == "network":
            what = f"the network has changed: it was busy for {times}"
        elif self.change.rank >= 0:
            what = f"rank {self.change.rank} has changed: the slowest rank computed {times}"
        else:
            what = f"compute has changed on most ranks: the slowest one computed {times}"
        return (
            f"{what}; planned again: {now.typical_step.step_ns / 1e6:.1f} ms per step predicted, "
            f"{self.before.typical_step.step_ns / 1e6:.1f} before"
        )

    def hold_iterations(self, profile: _core.Profile, plan: _core.Plan) -> int:
        """For how many iterations not to measure again: 0 if the change was real, more each time it was not."""
        old = self.before.plan
        if abs(plan.predicted_ns / self.before.in_force.predicted_ns - 1) > _REAL_CHANGE:
            return 0
        try:
            old.check(profile)
        except Error:
            return 0
        if _core.play(profile, profile.link, old).iteration_ns > (1 + NOTICEABLE_GAIN) * plan.predicted_ns:
            return 0
        return min(_HOLD_ITERATIONS_MAX, max(_HOLD_ITERATIONS, 2 * self.before.hold_iterations))
