"""Alarms of a training: the step reports against the prediction of the plan in force.

All ranks get the same reports and decide the same. The expectation stays when a training that has become slower is
planned again, so an alarm lasts until its cause is gone. If a link is slow, ranks exchange the traffic of their
connections since then, which names the hosts of the link.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

from gradcast import _core
from gradcast.alarms import COMPUTE, DATA, LINK, Alarm, Alarms, Observation
from gradcast.comparison.compare import link_of
from gradcast.host_traffic import leaving_share
from gradcast.slow_link import Flow, slow_hosts
from gradcast.training.measure import tcp_counters
from gradcast.training.plan import calibration
from gradcast.training.plan.agreement import AgreedPlan
from gradcast.training.plan.step_meter import Iteration
from gradcast.training.ranks.group import Group
from gradcast.training.ranks.hosts import own_host
from gradcast.training.ranks.step_reports import StepReport
from gradcast.training.step.gradient_exchange import GradientExchange

_log = logging.getLogger("gradcast")


@dataclasses.dataclass(frozen=True)
class _Expected:
    """Expected times of an iteration; None if not predicted. ``waiting_stage``: see stage_exposure.py."""

    waiting_stage: str
    step_ms: float | None
    link_ms: float | None


class StepAlarms:
    def __init__(
        self,
        group: Group,
        lag: int,
        exchange: GradientExchange,
        on_alarm: Callable[[Alarm], Any] | None,
        *,
        on_device: bool,
    ) -> None:
        """``lag``: age of the reports in iterations. ``on_device``: hosts run ahead, so the compute of ranks is not
        known, and gradients may be sent by other means than TCP."""
        self._group, self._lag, self._exchange, self._on_alarm = group, lag, exchange, on_alarm
        self._on_device = on_device
        self.alarms = Alarms(group.world_size)
        self.observed: Observation | None = None
        self._keeps = False  # what was expected, under the next plan
        self._reference: _core.Profile | None = None
        self._factor = 1.0  # what is expected of a step over what `play` says of the reference
        self._expected_ms: tuple[float | None, float | None] = None, None  # step, link
        self._before: dict[tcp_counters.Ends, tcp_counters.Carried] | None = None  # when the link was first suspected

    def plan_began(self, agreed: AgreedPlan, *, is_new: bool = True) -> None:
        """Expects the times of a plan. ``is_new``: not the one before, of which more is known."""
        if agreed.profile.link is None:  # a pinned plan
            self._reference = None
            self.alarms.learn(self._last_step)
            return
        plan = agreed.in_force
        names, known = (
            [tensor.name for tensor in each.tensors] if each else [] for each in (agreed.profile, self._reference)
        )
        reference = self._reference
        if reference is None or not self._keeps or names != known:
            reference = self._reference = agreed.profile
            played_ns = _core.play(agreed.profile, agreed.profile.link, plan).iteration_ns
            self._factor = agreed.typical_step.step_ns / played_ns
            if is_new:
                self.alarms.learn(self._last_step)
        step_ns = self._factor * _core.play(reference, link_of(reference), plan).iteration_ns
        busy_ns = sum(calibration.planned_busy_periods_ns(plan, reference))
        self._expected_ms = step_ns / 1e6, busy_ns / 1e6
        hosts = self._group.hosts
        if hosts.count > 1:
            bits = 8 * sum(block.size_bytes for block in plan.blocks)
            self.alarms.link_bits = bits * leaving_share(hosts, self._exchange.form, self._exchange.buffers.wire)

    def expected(self, waiting_stage: str) -> _Expected:
        """Returns the expectation of an iteration that follows the plan in force."""
        return _Expected(waiting_stage, *self._expected_ms)

    def add(self, begun: int, reported: Iteration | None, reports: Sequence[StepReport] | None) -> None:
        """``begun``: the number of steps that had ended when the last iteration began. ``reported``: the iteration that
        the reports are of."""
        if reported is None or reported.expected is None or reports is None:
            return
        self.observed = self._observation(begun + 2 - self._lag, reported.expected, reports)
        alarm = self.alarms.add(self.observed)
        if not self.alarms.is_suspect(LINK):
            self._before = None
        elif self._before is None and self._may_locate:
            self._before = tcp_counters.read()
        self._raise(alarm)

    def change_found(self, change: _core.Change) -> None:
        """Called when the monitor has found a change, before the ranks measure again. If most ranks compute longer, for
        example with larger batches, that is expected from then on."""
        is_worse = change.after_ns > change.before_ns
        self._keeps = is_worse and not (change.cause == "compute" and change.rank < 0)
        if is_worse and self.observed is not None:
            causes = [LINK] if change.cause == "network" else [COMPUTE, DATA]
            self._raise(self.alarms.confirm(self.observed, causes))

    def shares_changed(self) -> None:
        """Forgets the ranks' compute times, which change with their shares and are learned anew."""
        self._keeps = False
        self.alarms.learn(self._last_step)

    def stats(self) -> dict[str, Any]:
        return {
            "alarms": [dataclasses.asdict(alarm) for alarm in self.alarms.active],
            "observed": None if self.observed is None else dataclasses.asdict(self.observed),
        }

    @property
    def _last_step(self) -> int:
        return 0 if self.observed is None else self.observed.step

    def _observation(self, step: int, expected: _Expected, reports: Sequence[StepReport]) -> Observation:
        compute_ms, data_ms = [], []
        for report in reports if not self._on_device else ():
            facts, data_ns = report.facts, report.stages_ns["loop"]
            if expected.waiting_stage == "loop":
                data_ns -= facts.step_ns - facts.busy_ns
            data_ms.append(max(0.0, data_ns) / 1e6)
            compute_ms.append(max(0.0, facts.busy_ns - data_ns) / 1e6)
        return Observation(
            step=step,
            step_ms=max(report.facts.step_ns for report in reports) / 1e6,
            expected_ms=expected.step_ms,
            compute_ms=tuple(compute_ms),
            data_ms=tuple(data_ms),
            # The last rank to join does not wait for the others: its blocks take what the network takes.
            link_ms=min(report.facts.link_ns for report in reports) / 1e6,
            expected_link_ms=expected.link_ms,
        )

    @property
    def _may_locate(self) -> bool:
        return self._group.hosts.count > 1 and not self._on_device

    def _located(self, alarm: Alarm) -> Alarm:
        """Returns the alarm with the hosts of the slow link. Collective."""
        what = "the search for the slow link"

        def own() -> tuple[str, dict[tcp_counters.Ends, tcp_counters.Carried]]:
            return own_host()[0], {} if self._before is None else tcp_counters.since(self._before)

        with self._exchange.watch.waiting(what):
            names, carried = zip(*self._group.computed_by_each(own, what), strict=True)
        hosts = self._group.hosts
        flows = [
            Flow(hosts.host_of[sender], hosts.host_of[receiver], each.sent_bytes, each.sending_s)
            for sender, receiver, each in tcp_counters.between_ranks(carried)
        ]
        slow = slow_hosts(flows, hosts.count, alarm.slowdown)
        return self.alarms.locate(alarm, slow, [names[hosts.host_of.index(host)] for host in range(hosts.count)])

    def _raise(self, alarm: Alarm | None) -> None:
        if alarm is None:
            return
        if alarm.cause == LINK and self._may_locate:
            alarm = self._located(alarm)
        self._group.warning("%s", alarm.sentence)
        if self._on_alarm is None:
            return
        try:
            self._on_alarm(alarm)
        except Exception:
            # In the midst of backward, where the ranks must stay together.
            _log.exception("options.watch.on_alarm failed on rank %d; training goes on", self._group.rank)
