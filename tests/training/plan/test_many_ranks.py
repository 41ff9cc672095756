"""512 ranks, whose reports do not fit in one message: what the monitor and the alarms make of them. One rank's part is
the product's; the sum of all ranks' messages is made here.
"""

from types import SimpleNamespace

import pytest

from gradcast import _core
from training.needs import torch

pytest.importorskip("training.needs")
from gradcast.alarms import Alarms
from gradcast.training.plan.loop import Following
from gradcast.training.plan.step_alarms import StepAlarms
from gradcast.training.plan.step_meter import Iteration, StepMeter
from gradcast.training.ranks.step_reports import REPORT_ELEMENTS

WORLD_SIZE = 512
PER_TURN = 32
TURNS = WORLD_SIZE // PER_TURN
STEP_MS, BUSY_MS, LINK_MS = 110.0, 100.0, 60.0


class Ranks:
    """``step(number, on_baseline)``: the step and compute times in ms of all ranks, two tensors."""

    def __init__(self, step):
        self._step = step
        self._sums = torch.zeros(REPORT_ELEMENTS, dtype=torch.float64)
        message = SimpleNamespace(own_reports=torch.zeros(REPORT_ELEMENTS), reports=lambda: self._sums.tolist())
        exchange = SimpleNamespace(
            buffers=SimpleNamespace(flats=[self._sums]), counters=lambda: SimpleNamespace(link_ns=0)
        )
        hosts = SimpleNamespace(count=1)
        group = SimpleNamespace(rank=0, world_size=WORLD_SIZE, hosts=hosts, warning=lambda *_: None)
        self.meter = StepMeter(exchange, message, SimpleNamespace(current=None), group)
        self.phase = Following(_core.Monitor(WORLD_SIZE, busy_ns=1e6 * BUSY_MS, link_ns=1e6 * LINK_MS))
        self.decisions = []
        self.alarms = StepAlarms(group, self.meter.reports.lag, exchange, None, on_device=False)
        self.alarms.alarms = Alarms(WORLD_SIZE)
        self._steps = []

    def train(self, iterations):
        """As ``PlanLoop.begin_iteration`` does, without what a decision leads to."""
        for number in range(iterations):
            _, reports = self.meter.step_ended(0, "backward")
            self.alarms.add(number, self.meter.reported, reports)
            decision = self.phase.decide(self.meter.reported, reports)
            if decision is not None:
                self.decisions.append(decision)
                self.phase.on_baseline = decision.on_baseline
            expected = None if self.phase.on_baseline else self.alarms.expected("backward")
            self.meter.iterations.append(Iteration(self.phase, self.phase.on_baseline, expected))
            self._send(number)
            self._steps.append(self._step(number, self.phase.on_baseline))

    def _send(self, iteration):
        """The message of an iteration has the reports of the step before it."""
        self._sums.zero_()
        if not self._steps:
            return
        step_ms, busy_ms = self._steps[-1]
        turn = slice(PER_TURN * (iteration % TURNS), PER_TURN * (iteration % TURNS + 1))
        times_ms = torch.stack(
            [step_ms[turn], busy_ms[turn], torch.full((PER_TURN,), LINK_MS)]
            + [torch.full((PER_TURN,), each) for each in (60.0, 1.0, 49.0)]
        )
        self._sums[::2] = 1e-3 * times_ms.T.flatten()

    @property
    def changes(self):
        return [each.change for each in self.decisions if each.change is not None]


def everywhere(step_ms, busy_ms=BUSY_MS):
    return torch.full((WORLD_SIZE,), step_ms, dtype=torch.float64), torch.full((WORLD_SIZE,), busy_ms)


def test_one_slow_step_of_one_rank_changes_nothing():
    slow_at = 30 * TURNS + 5  # rank 200 reports it

    def step(number, on_baseline):
        step_ms, busy_ms = everywhere(1.3 * STEP_MS if on_baseline else STEP_MS)
        if number == slow_at:
            step_ms[:] = 5 * STEP_MS
            busy_ms[200] = 5 * BUSY_MS
        return step_ms, busy_ms

    ranks = Ranks(step)
    ranks.train(40 * TURNS)
    assert ranks.changes == []
    assert ranks.alarms.alarms.all == []
    assert len(ranks.decisions) == 38, "one of a round"


def test_a_rank_that_stays_slow_is_noticed():
    def step(number, on_baseline):
        step_ms, busy_ms = everywhere(1.3 * STEP_MS if on_baseline else STEP_MS)
        busy_ms[200] *= 2 if number > 30 * TURNS else 1
        return step_ms, busy_ms

    ranks = Ranks(step)
    ranks.train(46 * TURNS)
    (change, *_) = ranks.changes
    assert (change.cause, change.rank) == ("compute", 200)
    (alarm,) = ranks.alarms.alarms.active
    assert (alarm.cause, alarm.rank) == ("compute", 200)


@pytest.mark.parametrize("gain", [1.3, 1.05])
def test_a_trial_reads_the_gain_that_there_is(gain):
    ranks = Ranks(lambda _number, on_baseline: everywhere(gain * STEP_MS if on_baseline else STEP_MS))
    ranks.train(30 * TURNS)
    compared = ranks.phase.monitor.comparison()
    assert compared.baseline_count >= 3
    assert compared.baseline_ns / compared.plan_ns == pytest.approx(gain, abs=1e-6)
    assert ranks.decisions[-1].on_baseline is False
