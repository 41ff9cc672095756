"""The phases of a plan and their measurements; loop.py has the transitions."""

from collections.abc import Sequence

from gradcast import _core
from gradcast.training.plan.calibration import Calibration
from gradcast.training.plan.proposals import PlanChange
from gradcast.training.plan.step_meter import Iteration
from gradcast.training.plan.warmup import Warmup
from gradcast.training.ranks.step_reports import StepReport


class Phase:
    """``on_baseline``: the open iteration follows the DDP baseline, for good or as a trial. ``times_blocks``: the next
    ``begin_iteration`` needs to know when the blocks of this iteration have finished. ``slowest_rank``: one that has
    lately computed at least a tenth longer than the others."""

    on_baseline = False
    times_blocks = False
    slowest_rank: int | None = None


class Fixed(Phase):
    pass


class WarmingUp(Phase):
    times_blocks = True

    def __init__(self, warmup: Warmup, change: PlanChange | None = None) -> None:
        """``change``: why the ranks measure again."""
        self.warmup, self.change = warmup, change


class Following(Phase):
    """Follows a plan, and feeds its monitor."""

    def __init__(
        self, monitor: _core.Monitor, calibration: Calibration | None = None, *, on_baseline: bool = False
    ) -> None:
        """``calibration``: of the plan's first steps, in the phase Calibrating."""
        self.monitor, self.calibration, self.on_baseline = monitor, calibration, on_baseline
        self.iterations = 0  # since calibration

    @property
    def times_blocks(self) -> bool:  # type: ignore[override]
        return self.calibration is not None

    @property
    def slowest_rank(self) -> int | None:  # type: ignore[override]
        rank = self.monitor.slowest_rank
        return None if rank < 0 else rank

    def decide(self, reported: Iteration | None, reports: Sequence[StepReport] | None) -> _core.Decision | None:
        """Returns the monitor's decision. ``reported``: the iteration that the reports are of; None is returned for one
        before this plan."""
        if reported is None or reported.phase is not self:
            return None
        return self.monitor.on_iteration(reported.on_baseline, [report.facts for report in reports or []])
