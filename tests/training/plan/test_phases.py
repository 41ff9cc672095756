"""The plan loop while it follows a plan: what the monitor gets, and which phase comes next. The network, the group and
the monitor are given here; tests/training/plan/test_adapt.py has whole trainings."""

import itertools
from types import SimpleNamespace
from unittest import mock

import pytest

from gradcast import _core

pytest.importorskip("training.needs")
from gradcast.training.plan.agreement import AgreedPlan
from gradcast.training.plan.loop import Following, PlanLoop
from gradcast.training.plan.step_meter import Iteration

LAG = 2
REPORTS = [SimpleNamespace(facts="rank 0"), SimpleNamespace(facts="rank 1")]


def decision(on_baseline=False, stepped_aside=False, change=None):
    return SimpleNamespace(on_baseline=on_baseline, stepped_aside=stepped_aside, change=change)


class Loop:
    """A loop in the phase Following, of which all reports are known."""

    def __init__(self, *decisions, on_baseline=False, balancing=None):
        self.monitor = mock.Mock(slowest_rank=-1)
        self.monitor.on_iteration.side_effect = decisions
        self.phase = Following(self.monitor, on_baseline=on_baseline)
        self.plans = mock.Mock(balancing=balancing, _clipping=None, agreed=AgreedPlan(None, None), version=4)
        self.iterations = [Iteration("the phase before", True)] * LAG
        self.plans.leave_to_ddp.return_value = False
        self.plans.meter.reports.turns = 1
        self.plans._obey = lambda *given: PlanLoop._obey(self.plans, *given)
        for _ in range(LAG):
            assert self.next() is self.phase
        self.monitor.on_iteration.assert_not_called()

    def next(self, reports=REPORTS):
        self.plans.meter.reported = self.iterations[-LAG]
        found = PlanLoop._after_step(self.plans, self.phase, reports)
        self.iterations.append(Iteration(self.phase, self.phase.on_baseline))
        return found


def test_the_monitor_gets_what_an_iteration_followed_with_its_reports():
    tried = [True, False, False, False, False]
    loop = Loop(*map(decision, tried))
    for _ in tried:
        assert loop.next() is loop.phase
    followed = [False] * LAG + tried
    assert [call.args for call in loop.monitor.on_iteration.call_args_list] == [
        (each, ["rank 0", "rank 1"]) for each in followed[: len(tried)]
    ]
    assert [call.kwargs["on_baseline"] for call in loop.plans._activate.call_args_list] == [True, False]


def test_without_all_reports_the_monitor_gets_no_facts():
    loop = Loop(decision())
    loop.next(None)
    loop.monitor.on_iteration.assert_called_once_with(False, [])


@pytest.mark.parametrize("on_baseline", [False, True])
def test_a_change_is_measured_again(on_baseline):
    loop = Loop(decision(on_baseline=on_baseline, change="the change"), on_baseline=on_baseline)
    assert loop.next() is loop.plans._measure_again.return_value
    loop.plans._measure_again.assert_called_once_with("the change")
    loop.plans._activate.assert_not_called()


def test_a_change_waits_while_other_shares_may_answer_it():
    loop = Loop(decision(change="the change"), balancing=mock.Mock(defers=lambda change: change == "the change"))
    assert loop.next() is loop.phase
    loop.plans._measure_again.assert_not_called()


@pytest.mark.parametrize("is_tried_now", [False, True])
def test_where_the_baseline_is_as_fast_it_stays_active(is_tried_now):
    loop = Loop(decision(on_baseline=True, stepped_aside=True), on_baseline=is_tried_now)
    loop.plans.comparison = SimpleNamespace(baseline_ns=2e6, plan_ns=3e6)
    loop.monitor.comparison.return_value = loop.plans.comparison
    assert loop.next() is loop.phase
    assert loop.phase.on_baseline
    assert (loop.plans.agreed.runs_as_baseline, loop.plans.version) == (True, 5)
    assert loop.plans._activate.call_count == (0 if is_tried_now else 1)


def test_the_baseline_in_force_is_no_trial():
    loop = Loop(decision(on_baseline=True), on_baseline=True)
    assert loop.next() is loop.phase
    assert loop.phase.on_baseline
    loop.plans._activate.assert_not_called()
    assert loop.plans.version == 4


def test_a_real_monitor_is_fed():
    phase = Following(_core.Monitor(1))
    facts = _core.RankFacts(step_ns=2e6, busy_ns=1e6, link_ns=1e6)
    assert phase.decide(None, [SimpleNamespace(facts=facts)]) is None
    assert phase.decide(Iteration(phase, False), [SimpleNamespace(facts=facts)]).change is None


@pytest.mark.parametrize("turns", [1, 16])
def test_ddp_reduces_once_the_monitor_knows_what_is_usual(turns):
    """With 512 ranks a round of reports takes 16 steps."""
    plans = Loop(on_baseline=True)
    plans.monitor.on_iteration.side_effect = itertools.repeat(decision(on_baseline=True))
    plans.plans.agreed, plans.plans.meter.reports.turns = AgreedPlan(None, None, runs_as_baseline=True), turns
    for _ in range(31 * turns):
        plans.next()
    plans.plans.leave_to_ddp.assert_not_called()
    for _ in range(turns):
        plans.next()
    plans.plans.leave_to_ddp.assert_called_once()
