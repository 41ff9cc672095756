"""The phases of a plan: what happens in each, and which follows which.

A session's plan goes through phases, one class each. All ranks are in the same phase, and all change it at the start of
the same iteration::

    phase          next phase
    WarmingUp      Calibrating or Fixed
    Calibrating    Following
    Following      WarmingUp or Calibrating
    Fixed          none

* ``WarmingUp``: the first steps, and the first ones after a change, are measured. Then all ranks agree on a plan made
  from the measurements. If the user has pinned a plan or turned ``adapt`` off, ``Fixed`` follows, otherwise
  ``Calibrating``.
* ``Calibrating``: the plan's first steps are compared with the prediction. If they differ, the plan is made again.
* ``Following``: the monitor (include/gradcast/monitor.h) learns the same facts on every rank, and so decides the same.
  It tries the DDP baseline for a few iterations from time to time. If that is as fast, or if the plan is expected to
  gain too little, the baseline is in force: gradients travel as DDP sends them. If the network or the compute has
  changed for good, ``WarmingUp`` follows. If clipping certifies many more or fewer steps than before, the plan is made
  again from the same measurements, and ``Calibrating`` follows if it is another one. With shares of the batch that
  follow the ranks' speed, a change of one rank's compute waits until these could have changed.
* ``Fixed``: the plan is followed whatever happens.

When the plan of a checkpoint is adopted, ``Following`` or ``Fixed`` begins, or ``Calibrating`` if it is made for other
workers. When the ranks' shares have changed, the plan is made again for the compute that is predicted with them, and
``Calibrating`` begins.
"""

import collections
from collections.abc import Sequence
from typing import Any

from gradcast import _core
from gradcast.training.plan.calibration import Calibration
from gradcast.training.plan.proposals import PlanChange
from gradcast.training.plan.warmup import Warmup
from gradcast.training.ranks.step_reports import StepReport

# After so many steps of a plan, and then again, the share of steps that clipping certifies is looked at.
_SHARE_STEPS = 64


class PlanPhase:
    """A phase, as the controller sees it. By default nothing happens in it."""

    on_baseline = False  # the open iteration follows the DDP baseline, for good or as a trial
    slowest_rank: int | None = None  # has lately computed at least a tenth longer than the others
    times_blocks = False  # the next ``begin_iteration`` needs to know when the blocks of this iteration have finished

    def begin_iteration(self, own: StepReport | None, reports: Sequence[StepReport] | None) -> "PlanPhase":
        """Called when an iteration begins. Nothing is in flight, except in a device's queue unless ``times_blocks``.
        Returns the phase of this iteration.

        ``own``: this rank's report of the step that ends now, None if it tells nothing. ``reports``: the last ones that
        are known of all ranks, in rank order, None if one is missing.
        """
        return self

    def iteration_began(self) -> None:
        """Called when it is decided what the iteration follows."""


class WarmingUp(PlanPhase):
    times_blocks = True

    def __init__(self, controller: Any, warmup: Warmup, change: PlanChange | None = None) -> None:
        """``change``: why the ranks measure again."""
        self._controller = controller
        self._change = change
        self.warmup = warmup

    def begin_iteration(self, own: StepReport | None, reports: Sequence[StepReport] | None) -> PlanPhase:
        # All ranks begin equally many iterations; on one of them the loop may leave out step().
        self.warmup.stopwatch.backward_started()
        ended = self._controller.exchange.timeline()
        if not ended:
            return self
        agreed = self.warmup.step_ended(ended[-1])
        if agreed is not None:
            self._controller.follow(agreed)
            return self
        with self._controller.agreeing():
            agreed = self._controller.agree_on_measured_plan(self.warmup, self._change)
            phase = self._controller.start_plan(agreed, Calibrating)
        if self._change is not None:
            self._controller.group.info(self._change.sentence(agreed))
        return phase


class Fixed(PlanPhase):
    """The plan never changes."""


class MonitorFeed:
    """The monitor of one plan, and the iterations of this plan that it has not heard of yet: reports come ``lag``
    iterations late."""

    def __init__(self, monitor: _core.Monitor, lag: int) -> None:
        self.monitor = monitor
        self._on_baseline: collections.deque[bool] = collections.deque(maxlen=lag)

    def iteration_began(self, on_baseline: bool) -> None:
        self._on_baseline.append(on_baseline)

    def decide(self, reports: Sequence[StepReport] | None) -> _core.Decision | None:
        """Returns None as long as the reports are of iterations before this plan."""
        if len(self._on_baseline) < self._on_baseline.maxlen:
            return None
        return self.monitor.on_iteration(self._on_baseline[0], [report.facts for report in reports or []])


class Monitored(PlanPhase):
    """A phase whose iterations the monitor hears of."""

    def __init__(self, controller: Any, feed: MonitorFeed) -> None:
        self._controller = controller
        self._feed = feed
        self.on_baseline = controller.agreed.runs_as_baseline

    def iteration_began(self) -> None:
        self._feed.iteration_began(self.on_baseline)

    @property
    def slowest_rank(self) -> int | None:
        rank = self._feed.monitor.slowest_rank
        return None if rank < 0 else rank


class Calibrating(Monitored):
    times_blocks = True

    def __init__(self, controller: Any, feed: MonitorFeed) -> None:
        super().__init__(controller, feed)
        self._calibration = Calibration(controller.agreed.in_force, controller.profile.link.pack_ns_per_byte)

    def begin_iteration(self, own: StepReport | None, reports: Sequence[StepReport] | None) -> PlanPhase:
        ended = self._controller.exchange.timeline()
        compute = self._controller.compute_of_last_step(own)
        if not self._calibration.add_step(ended[-1] if ended else None, compute):
            return self
        with self._controller.agreeing():
            agreed = self._controller.agree_on_calibrated_plan(self._calibration)
            if self._controller.keep_if_confirmed(agreed):
                return Following(self._controller, self._feed)
            return self._controller.follow_corrected(agreed)


class Following(Monitored):
    def __init__(self, controller: Any, feed: MonitorFeed) -> None:
        super().__init__(controller, feed)
        self._iterations = 0

    def begin_iteration(self, own: StepReport | None, reports: Sequence[StepReport] | None) -> PlanPhase:
        phase = self._obey_monitor(reports)
        self._iterations += 1
        if phase is not self:
            return phase
        rounds, position = divmod(self._iterations, _SHARE_STEPS)
        if rounds and position == 0:
            self._controller.proposer.ask_if_share_differs()
        if rounds and position == 1 and self._controller.proposer.is_asked:
            return self._controller.plan_for_certified_share(self)
        return self

    def _obey_monitor(self, reports: Sequence[StepReport] | None) -> PlanPhase:
        decision = self._feed.decide(reports)
        if decision is None:
            return self
        self._controller.comparison = self._feed.monitor.comparison()
        if decision.change is not None and not self._controller.defers(decision.change):
            return self._controller.measure_again(decision.change)
        if decision.on_baseline != self.on_baseline:
            self.on_baseline = decision.on_baseline
            self._controller.activate(on_baseline=decision.on_baseline)
        if decision.stepped_aside:
            self._controller.fall_back()
        return self
