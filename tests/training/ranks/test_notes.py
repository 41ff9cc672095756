"""Step reports arrive in every dtype and for any number of ranks."""

from types import SimpleNamespace

import pytest

from gradcast import _core
from training.needs import torch

pytest.importorskip("training.needs")
from gradcast.training.ranks.step_reports import StepReport, StepReports
from gradcast.training.step.gradient_buffers import REPORT_ELEMENTS, GradientBuffers


def report_of(rank, iteration):
    facts = _core.RankFacts(
        step_ns=1e8 + 1e6 * rank + 1e3 * iteration, busy_ns=7.654321e7 + rank, link_ns=12_345.0 * rank
    )
    return StepReport(facts, {"backward": 5.5e7 + rank, "loop": 1e6, "forward": 2.25e7 + 10.0 * rank})


def buffer_of(dtype):
    return SimpleNamespace(
        reports=torch.zeros(REPORT_ELEMENTS, dtype=dtype), findings=lambda: torch.zeros(2, dtype=dtype)
    )


def play(dtype, world_size, iterations):
    """What each iteration's exchange returns on each rank."""
    buffers = [buffer_of(dtype) for _ in range(world_size)]
    reports = [StepReports(buffer, rank, world_size) for rank, buffer in enumerate(buffers)]
    told = []
    for iteration in range(iterations):
        told.append(
            [each.exchange(report_of(rank, iteration - 1) if iteration else None) for rank, each in enumerate(reports)]
        )
        total = torch.stack([buffer.reports for buffer in buffers]).sum(0)
        for buffer in buffers:
            buffer.reports.copy_(total)
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


def test_a_failed_pass_is_told_with_its_iteration():
    buffer = buffer_of(torch.float32)
    reports = StepReports(buffer, 0, 2)
    for iteration in range(3):
        reports.exchange(None)
        assert reports.failed_iteration is None
        buffer.findings = lambda failed=float(iteration == 2): torch.tensor([failed, 0.0])
    reports.exchange(None)
    assert (reports.failed_iteration, reports.differing_iteration) == (2, None)


def test_many_ranks_take_turns():
    world_size, turns = 70, 3
    told = play(torch.float32, world_size, 12)
    assert all(known is None for everyone in told[:turns] for known in everyone)
    last = told[-1]
    for known in last:
        assert [as_numbers(fact) for fact in known] == [as_numbers(fact) for fact in last[0]]
        for rank, fact in enumerate(known):
            # Of one of the last iterations, whichever was this rank's turn.
            iteration = round((fact.facts.step_ns - 1e8 - 1e6 * rank) / 1e3)
            assert 10 - turns <= iteration <= 10


def test_reports_move_with_the_gradients():
    parameters = [torch.zeros(3), torch.zeros(5)]
    buffers = GradientBuffers(["a", "b"], parameters, 2)
    parameters[0].grad = buffers.views[0].fill_(1.0)
    buffers.reports.fill_(7.0)
    buffers.lay_out([1, 0])
    assert buffers.reports.tolist() == [7.0] * len(buffers.reports)
    assert buffers.views[0].tolist() == [1.0] * 3
    assert buffers.views[1].tolist() == [0.0] * 5
