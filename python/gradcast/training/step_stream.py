"""The steps of a training on this rank, one by one, for ``handle.on_step`` and ``observe``."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

from gradcast import _core
from gradcast.intervals import busy_periods_ns
from gradcast.training.measure.compute_cost import compute_of
from gradcast.training.measure.step_trace import StepRecord
from gradcast.training.sessions.kinds import Attached, TrainingSession


@dataclasses.dataclass(frozen=True)
class Step:
    """One step, from the start of its backward pass to the start of the next. ``number``: steps completed before it.
    ``plan``: that it followed. ``backward_ns``, ``update_ns``: computed; ``forward_ns``: everything else, as in a
    profile, but for ``wait_ns``, in which the training thread waited for the network. ``link_ns``: some block was ready
    to be sent or in flight. ``update_calls``: of the optimizers. Where no plan is followed (local steps, one worker,
    GRADCAST_DISABLE) it lasts from the end of one ``step()`` to the end of the next, and the rest is None."""

    number: int
    start_ns: int
    step_ns: int
    plan: _core.Plan | None = None
    backward_ns: float | None = None
    forward_ns: float | None = None
    update_ns: float | None = None
    wait_ns: float | None = None
    link_ns: float | None = None
    update_calls: int | None = None


def steps_of(session: TrainingSession, records: Sequence[StepRecord]) -> list[Step]:
    """``records``: complete ones of the session, which follows a plan if there are any."""
    iterations = {each.iteration: each.blocks for each in cast(Any, session).exchange.timeline()} if records else {}
    return [_step(each, iterations[each.iteration]) for each in records if each.iteration in iterations]


def _step(record: StepRecord, blocks: Sequence[_core.BlockRecord]) -> Step:
    start_ns, wait_ns = int(record.start_ns), record.total_ns("wait")
    step_ns = record.end_ns - start_ns
    compute = compute_of(record, step_ns - wait_ns)
    link_ns = sum(busy_periods_ns((each.due_ns, each.finish_ns) for each in blocks))
    return Step(record.step, start_ns, step_ns, record.plan, *compute, wait_ns, link_ns, record.update_calls)


class StepStream:
    """Calls ``function`` with each step whose network times are known, where ``step()`` returns."""

    def __init__(self, attached: Attached, function: Callable[[Step], Any]) -> None:
        self._attached, self._function = attached, function
        self._since_ns, self._count = time.perf_counter_ns(), attached.session.progress.steps

    def after_step(self, _names: Sequence[str]) -> None:
        for step in self._new_steps():
            self._function(step)

    def _new_steps(self) -> list[Step]:
        session, since_ns = self._attached.session, self._since_ns
        if session.report.trace is None or getattr(session.report, "reduced_by_ddp", False):
            self._since_ns = time.perf_counter_ns()
            self._count += 1
            return [Step(self._count - 1, since_ns, self._since_ns - since_ns)]
        found = steps_of(session, [each for each in session.report.trace.complete if each.start_ns >= since_ns])
        self._since_ns = found[-1].start_ns + 1 if found else since_ns
        return found
