"""The choice of the step of the next snapshot, in which the ranks' writers agree.

When one snapshot is written, rank 0 chooses the step of the next. Each rank confirms that it has not come to it yet;
otherwise a later one is chosen. Once a rank wants one soon, all look for an earlier step in the same way.

Thread safety: ``ask`` may be called from any thread, the others from the writer's.
"""

import math
from collections.abc import Callable

from gradcast.snapshots import frequency
from gradcast.snapshots.agreement import Agreement, LeftError
from gradcast.snapshots.report import Outcome, Report
from gradcast.snapshots.schedule import Schedule


class NextStep:
    """``every``: steps from one snapshot to the next; None for as few as ``overhead`` allows. ``asked_at``: this rank's
    step when it wanted a snapshot soon."""

    def __init__(
        self, agreement: Agreement, schedule: Schedule, report: Report, every: int | None, overhead: float
    ) -> None:
        self._agreement, self._schedule, self._report = agreement, schedule, report
        self._every, self._overhead = every, overhead
        self.asked_at: int | None = None
        self._has_met = self._is_served = False
        self._costs = frequency.Costs()

    def ask(self) -> None:
        """Requests a snapshot soon, before the program ends. Safe in a signal's handler."""
        self.asked_at = self._schedule.step

    def is_asked(self) -> bool:
        """Returns whether a rank has asked, until the ranks have met."""
        if self._has_met:
            return False
        if self.asked_at is not None:
            self._agreement.ask_for_one()
        return self.asked_at is not None or self._agreement.is_asked_for_one()

    def choose(self, step: int, outcome: Outcome) -> None:
        """Chooses the next step. ``outcome``: of the snapshot of ``step``."""
        if outcome.error is None:
            self._costs.add(outcome.write_s, outcome.cost_s, outcome.step_s)
        medians_s = self._costs.medians_s()
        write_s, cost_s, step_s = medians_s or (outcome.write_s, outcome.cost_s, outcome.step_s)
        every = self._every or frequency.steps_between(write_s, cost_s, step_s, self._overhead)
        self._report.chosen(every, write_s, cost_s, step_s, outcome.network_s)
        soon = self._agreement.decide(None, lambda _: self._agreement.is_asked_for_one() and not self._is_served)
        self._choose(outcome.step, lambda now: step + every * max(1, math.ceil((now - step) / every)), soon, None)

    def meet(self, has_task: Callable[[], bool]) -> None:
        """A rank wants a snapshot before the one that is chosen. While some rank already takes that, there is none.
        ``has_task``: this rank does."""
        self._has_met = True
        pending = self._schedule.next
        steps = self._agreement.meet((self._schedule.step, pending), has_task)
        if steps is None:
            return
        now = max(step for step, _ in steps)
        if {each for _, each in steps} == {pending} and pending is not None and now + 2 < pending:
            self._choose(now, lambda now: pending, True, pending)

    def _choose(self, now: int, usual: Callable[[int], int], soon: bool, instead_of: int | None) -> None:
        """``usual``: from the lowest step that it can be, that of a snapshot without hurry."""
        margin = 1
        while True:
            chosen = now + margin if soon else usual(now + margin)
            if instead_of is not None and chosen >= instead_of:
                return
            fits = self._schedule.propose(chosen, instead_of)
            own = (fits, self._schedule.step, self._schedule.next == instead_of, self._schedule.has_ended)
            agreed, now, possible, closing = self._agreement.decide(own, _combined)
            self._schedule.settle(agreed)
            if closing:
                raise LeftError("another rank has closed its snapshots")
            if agreed and soon:
                self._is_served = True
                self._report.taken_soon(chosen)
            if agreed or not possible:
                return
            margin *= 2


def _combined(answers: list[tuple[bool, int, bool, bool]]) -> tuple[bool, int, bool, bool]:
    fits, steps, possible, closing = zip(*answers, strict=True)
    return all(fits), max(steps), all(possible), any(closing)
