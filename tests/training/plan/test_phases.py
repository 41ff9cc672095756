"""The phases of a plan: what the monitor hears, and which phase follows which. The network, the group and the monitor
are given here; tests/training/plan/test_adapt.py has whole trainings."""

from types import SimpleNamespace
from unittest import mock

import pytest

from gradcast import _core

pytest.importorskip("training.needs")
from gradcast.training.plan import phases

LAG = 2
REPORTS = [SimpleNamespace(facts="rank 0"), SimpleNamespace(facts="rank 1")]


def decision(on_baseline=False, stepped_aside=False, change=None):
    return SimpleNamespace(on_baseline=on_baseline, stepped_aside=stepped_aside, change=change)


def following(*decisions, on_baseline=False):
    """The phase Following, of which all reports are known, its controller and its monitor."""
    monitor = mock.Mock(slowest_rank=-1)
    monitor.on_iteration.side_effect = decisions
    feed = phases.MonitorFeed(monitor, LAG)
    plans = mock.Mock(agreed=mock.Mock(runs_as_baseline=on_baseline), defers=lambda change: False)
    phase = phases.Following(plans, feed)
    for _ in range(LAG):
        assert phase.begin_iteration(None, REPORTS) is phase
        phase.iteration_began()
    monitor.on_iteration.assert_not_called()
    return phase, plans, monitor


def test_the_monitor_hears_what_an_iteration_followed_when_its_reports_come():
    tried = [True, False, False, False, False]
    phase, plans, monitor = following(*map(decision, tried))
    for _ in tried:
        assert phase.begin_iteration(None, REPORTS) is phase
        phase.iteration_began()
    followed = [False] * LAG + tried
    assert [call.args for call in monitor.on_iteration.call_args_list] == [
        (each, ["rank 0", "rank 1"]) for each in followed[: len(tried)]
    ]
    assert [call.kwargs["on_baseline"] for call in plans.activate.call_args_list] == [True, False], "once per change"


def test_of_an_iteration_without_all_reports_the_monitor_hears_no_facts():
    phase, _, monitor = following(decision())
    phase.begin_iteration(None, None)
    monitor.on_iteration.assert_called_once_with(False, [])


@pytest.mark.parametrize("on_baseline", [False, True])
def test_a_change_is_measured_again(on_baseline):
    phase, plans, _ = following(decision(on_baseline=on_baseline, change="the change"), on_baseline=on_baseline)
    assert phase.begin_iteration(None, REPORTS) is plans.measure_again.return_value
    plans.measure_again.assert_called_once_with("the change")
    plans.activate.assert_not_called()


def test_a_change_waits_while_other_shares_may_answer_it():
    phase, plans, _ = following(decision(change="the change"))
    plans.defers = lambda change: change == "the change"
    assert phase.begin_iteration(None, REPORTS) is phase
    plans.measure_again.assert_not_called()


@pytest.mark.parametrize("is_tried_now", [False, True])
def test_where_the_baseline_is_as_fast_it_stays_active(is_tried_now):
    phase, plans, _ = following(decision(on_baseline=True, stepped_aside=True), on_baseline=is_tried_now)
    assert phase.begin_iteration(None, REPORTS) is phase
    assert phase.on_baseline
    plans.fall_back.assert_called_once_with()
    assert plans.activate.call_count == (0 if is_tried_now else 1)


def test_the_baseline_in_force_is_no_trial():
    phase, plans, _ = following(decision(on_baseline=True), on_baseline=True)
    assert phase.begin_iteration(None, REPORTS) is phase
    assert phase.on_baseline
    plans.activate.assert_not_called()
    plans.fall_back.assert_not_called()


def test_a_real_monitor_is_fed():
    feed = phases.MonitorFeed(_core.Monitor(1), lag=1)
    facts = _core.RankFacts(step_ns=2e6, busy_ns=1e6, link_ns=1e6)
    assert feed.decide([SimpleNamespace(facts=facts)]) is None
    feed.iteration_began(False)
    assert feed.decide([SimpleNamespace(facts=facts)]).change is None
