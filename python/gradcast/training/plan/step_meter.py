"""Measures each step on this rank, and exchanges the measurements with the other ranks."""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from gradcast import _core
from gradcast.training.measure import compute_cost
from gradcast.training.measure.clocks import clock_of
from gradcast.training.measure.stage_exposure import StageExposure
from gradcast.training.measure.step_trace import Stamp, StepTrace
from gradcast.training.ranks.group import Group
from gradcast.training.ranks.step_reports import StepReport, StepReports
from gradcast.training.step.gradient_exchange import GradientExchange
from gradcast.training.step.step_message import StepMessage


@dataclasses.dataclass
class Iteration:
    """An iteration whose reports come later. ``phase``: of the plan loop. ``expected``: by the alarms, None if nothing
    is predicted. ``weights``: of the ranks, empty if it had none or has not ended."""

    phase: Any
    on_baseline: bool
    expected: Any = None
    weights: tuple[float, ...] = ()


class StepMeter:
    """``iterations``: the last ones, back to the first that new reports are of. ``interrupted``: the program has
    completed the open step early, so its times are not reported. ``sees_compute``: False on a device, where the host
    runs ahead, so its time outside of waits is not compute."""

    def __init__(self, exchange: GradientExchange, message: StepMessage, trace: StepTrace, group: Group) -> None:
        device = exchange.buffers.flats[0].device
        self._exchange, self.trace = exchange, trace
        lag = 2 if device.type == "cpu" else 3
        self.reports = StepReports(message.own_reports, message.reports, group.rank, group.world_size, lag)
        self._kept = self.reports.lag + self.reports.turns - 1
        self.iterations: collections.deque[Iteration] = collections.deque(maxlen=self._kept)
        self.exposed = StageExposure()
        self.interrupted = False
        self.sees_compute = device.type == "cpu"
        self._clock = clock_of(device)
        self._start_ns = 0  # of the open iteration's backward pass
        self._link_ns = 0  # of all iterations until now

    def step_ended(self, start_ns: int, waiting_stage: str) -> tuple[StepReport | None, Sequence[StepReport] | None]:
        """Returns this rank's report of the step that ends where the next backward pass starts, and the reports of all
        ranks in rank order that have become known; None if one is missing, or is of another plan than the others.
        ``waiting_stage``: see stage_exposure.py."""
        self.exposed.set_waiting_stage(waiting_stage)
        self._start_ns = start_ns
        facts, record = self._own_facts(start_ns), self.trace.current
        own = None
        if record is not None:
            stages_ns = self.exposed.own_stages_ns(record, start_ns - record.start_ns)
            own = None if facts is None else StepReport(facts, stages_ns)
        reports = self.reports.exchange(own)
        followed = {
            (id(each.phase), each.on_baseline) for each in itertools.islice(self.iterations, self.reports.turns)
        }
        if reports is None or len(followed) > 1:
            return own, None
        self.exposed.add(reports)
        return own, reports

    def pause(self) -> None:
        """Reports nothing until ``resume``. Call ``step_ended`` again only after that."""
        self.reports.pause()

    def resume(self) -> None:
        """The iterations before this one are not reported."""
        self.iterations.clear()
        self._link_ns = self._exchange.counters().link_ns

    @property
    def reported(self) -> Iteration | None:
        """The last iteration that the last reports are of. None if they are of none of this session, or if they have
        become known before: ranks take turns."""
        is_new = self.reports.ends_round and len(self.iterations) == self._kept
        return self.iterations[self.reports.turns - 1] if is_new else None

    def compute_of_last_step(
        self, own: StepReport | None, part_ns: float
    ) -> Callable[[], compute_cost.Compute | None] | None:
        """Returns a function for the compute of the step that ``own`` reports; on a device it waits. ``part_ns``: see
        compute_of."""
        record, end = self.trace.current, self._start_ns
        if own is None or record is None:
            return None
        if self.sees_compute:
            return functools.partial(compute_cost.compute_of, record, own.facts.busy_ns, part_ns)
        if not (isinstance(record.start_ns, Stamp) and isinstance(end, Stamp)):
            return None
        return functools.partial(compute_cost.device_compute_of, record, end, self._clock, part_ns)

    def stamp_device(self, wanted: bool) -> None:
        """Selects whether the next steps are recorded with points of the device's stream."""
        self.trace.device_clock = self._clock if wanted and not self.sees_compute else None

    def _own_facts(self, start_ns: int) -> _core.RankFacts | None:
        link_ns = self._exchange.counters().link_ns
        before, self._link_ns = self._link_ns, link_ns
        record, interrupted = self.trace.current, self.interrupted
        self.interrupted = False
        if record is None or interrupted:
            return None
        step_ns = start_ns - record.start_ns
        return _core.RankFacts(step_ns=step_ns, busy_ns=step_ns - record.total_ns("wait"), link_ns=link_ns - before)
