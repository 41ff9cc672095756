"""Step reports arrive in every dtype and for any number of ranks."""

import pytest

from gradcast import _core
from training.needs import torch

pytest.importorskip("training.needs")
from gradcast.training.ranks.step_reports import REPORT_ELEMENTS, StepReport, StepReports


def report_of(rank, iteration):
    facts = _core.RankFacts(
        step_ns=1e8 + 1e6 * rank + 1e3 * iteration, busy_ns=7.654321e7 + rank, link_ns=12_345.0 * rank
    )
    return StepReport(facts, {"backward": 5.5e7 + rank, "loop": 1e6, "forward": 2.25e7 + 10.0 * rank})


def play(dtype, world_size, iterations):
    """What each iteration's exchange returns on each rank."""
    sent, sums = torch.zeros(world_size, REPORT_ELEMENTS, dtype=dtype), torch.zeros(REPORT_ELEMENTS, dtype=dtype)
    reports = [StepReports(own, sums.tolist, rank, world_size, 2) for rank, own in enumerate(sent)]
    told = []
    for iteration in range(iterations):
        told.append(
            [each.exchange(report_of(rank, iteration - 1) if iteration else None) for rank, each in enumerate(reports)]
        )
        torch.sum(sent, 0, out=sums)
    return told


def as_numbers(known):
    facts = known.facts
    return facts.step_ns, facts.busy_ns, facts.link_ns, *known.stages_ns.values()


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float64, 1e-9), (torch.float32, 1e-6), (torch.bfloat16, 1e-4), (torch.float16, 1e-4)]
)
def test_times_arrive_one_iteration_later(dtype, error):
    for iteration, everyone in enumerate(play(dtype, 3, 6)):
        for known in everyone:
            if iteration < 2:
                assert known is None
                continue
            for rank, fact in enumerate(known):
                # Half precision holds tens of nanoseconds.
                assert as_numbers(fact) == pytest.approx(as_numbers(report_of(rank, iteration - 2)), rel=error, abs=100)


def test_many_ranks_take_turns():
    """All reports of a round are known where it ends, once, and none is older."""
    told = play(torch.float32, 70, 13)
    assert [all(everyone) for everyone in told] == [n in (6, 9, 12) for n in range(13)]
    for iteration in (6, 9, 12):
        for known in told[iteration]:
            assert [as_numbers(fact) for fact in known] == [as_numbers(fact) for fact in told[iteration][0]]
            for rank, fact in enumerate(known):
                turn = rank // 32
                assert as_numbers(fact) == pytest.approx(as_numbers(report_of(rank, iteration - 4 + turn)), abs=100)


def test_who_misses_a_turn_reports_the_step_before():
    """Else no round of many ranks would be whole in a loop that completes every tenth step early."""
    own, sums = torch.zeros(2, REPORT_ELEMENTS)
    reports = StepReports(own, sums.tolist, 40, 64, 2)
    reports.exchange(report_of(40, 0))  # the turn of ranks 0 to 31
    assert not own.any()
    reports.exchange(None)
    assert own[8 * 12] + own[8 * 12 + 1] == pytest.approx(report_of(40, 0).facts.step_ns / 1e9)
    reports.exchange(None)
    reports.exchange(None)
    assert not own.any(), "nothing is reported twice"
