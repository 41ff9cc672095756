"""Ranks that agree on the step of the next snapshot: threads stand for them, a store of this process for torch's."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from gradcast.snapshots.schedule import Schedule
from training.needs import torch

pytest.importorskip("torch")
from gradcast.snapshots.agreement import Agreement, LeftError

RANKS = 3


def together(action, ranks=range(RANKS)):
    """What ``action(agreement, rank)`` returns, or raises, on each rank."""
    store = torch.distributed.HashStore()
    agreements = [Agreement(store, rank, RANKS) for rank in range(RANKS)]
    with ThreadPoolExecutor(RANKS) as pool:
        running = [pool.submit(action, agreements[rank], rank) for rank in ranks]
        return [each.exception(20) or each.result() for each in running]


def test_all_ranks_get_what_the_first_decides():
    def action(agreement, rank):
        return [agreement.decide((rank, round_), lambda answers: [*answers, "decided"]) for round_ in range(5)]

    expected = [[*((rank, round_) for rank in range(RANKS)), "decided"] for round_ in range(5)]
    assert together(action) == [expected] * RANKS


def test_a_rank_that_has_left_keeps_nobody_waiting():
    def action(agreement, rank):
        agreement.decide(rank, max)
        if rank == 1:
            agreement.leave("closed")
            return None
        return agreement.decide(rank, max)

    first, second, third = together(action)
    assert second is None
    for each in (first, third):
        assert isinstance(each, LeftError)
        assert str(each) == "rank 1: closed"


def test_who_leaves_behind_a_decision_has_taken_part_in_it():
    def action(agreement, rank):
        found = agreement.decide(rank, max)
        if rank == 0:
            agreement.leave("closed")
        return found

    assert together(action) == [2] * RANKS


def test_ranks_meet_unless_the_first_must_stop():
    asked, stopped = threading.Event(), threading.Event()

    def action(agreement, rank):
        if rank == 1:
            agreement.ask_for_one()
            asked.set()
        assert asked.wait(10)
        assert agreement.is_asked_for_one()
        return agreement.meet(rank, lambda: False)

    def stopping(agreement, rank):
        if rank == 2:  # is elsewhere, and comes when the others have gone
            assert stopped.wait(10)
        found = agreement.meet(rank, lambda: True)
        stopped.set()
        return found

    assert together(action) == [[0, 1, 2]] * RANKS
    assert together(stopping) == [None] * RANKS


def test_a_rank_that_wants_to_meet_is_not_waited_for_elsewhere():
    def action(agreement, rank):
        met = "elsewhere"
        if rank == 1:
            agreement.ask_for_one()
            met = agreement.meet(rank, lambda: False)
        found = agreement.decide(rank, max)
        return met, found, agreement.meet(rank, lambda: False) if rank != 1 else None

    assert together(action) == [("elsewhere", 2, None), (None, 2, None), ("elsewhere", 2, None)]


def test_a_step_is_due_once():
    schedule = Schedule(step=4, first=6)
    assert [schedule.advance() for _ in range(3)] == [False, True, False]
    assert schedule.next is None


def test_a_step_that_was_passed_is_no_choice():
    schedule = Schedule(step=4, first=5)
    assert schedule.advance()
    assert not schedule.propose(5, None)
    assert schedule.propose(7, None)
    schedule.settle(True)
    assert not schedule.propose(6, None), "another one is chosen"
    assert schedule.propose(6, 7)
    schedule.settle(False)
    assert [schedule.advance() for _ in range(2)] == [False, True]


@pytest.mark.parametrize("agreed", [True, False])
def test_the_training_waits_at_a_proposed_step_until_it_is_settled(agreed):
    schedule = Schedule(step=0, first=1)
    assert schedule.advance()
    assert schedule.propose(2, None)
    with ThreadPoolExecutor(1) as pool:
        due = pool.submit(schedule.advance)
        time.sleep(0.05)
        assert not due.done()
        schedule.settle(agreed)
        assert due.result(10) == agreed


def test_the_end_lets_the_training_go_on():
    schedule = Schedule(step=0, first=5)
    assert schedule.propose(1, 5)
    with ThreadPoolExecutor(1) as pool:
        due = pool.submit(schedule.advance)
        schedule.end()
        assert not due.result(10)
    assert not schedule.propose(9, None)


def test_a_step_that_nobody_agrees_on_holds_training_up_for_a_time_only(monkeypatch):
    monkeypatch.setattr("gradcast.snapshots.schedule._LONGEST_WAIT_S", 0.1)
    schedule = Schedule(step=4, first=6)
    assert schedule.propose(5, 6)
    with pytest.raises(TimeoutError, match="did not agree on step 5 within"):
        schedule.advance()
