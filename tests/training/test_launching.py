"""How long operations run in a step of the doctor, and what goes by between them."""

import time

import pytest

from training.needs import torch

nn = torch.nn
MS = 1e6


def spans(*pairs):
    from gradcast.diagnosis.launching import Span

    return [Span(begin * MS, end * MS) for begin, end in pairs]


def test_operations_inside_of_others_and_beside_them_count_once():
    from gradcast.diagnosis.launching import stretches

    found = stretches(spans((20, 30), (0, 10), (2, 4), (3, 5), (25, 40), (50, 50)))
    assert [(each.begin_ns / MS, each.end_ns / MS, each.inside) for each in found] == [
        (0, 10, 2),
        (20, 40, 1),
        (50, 50, 0),
    ]
    assert stretches([]) == []


def marks(*stages):
    return [(stage, span) for (stage, *ends) in stages for span in spans(tuple(ends))]


FIRST = (("forward", 0, 1), ("backward", 1, 2), ("update", 2, 3))  # left out
STEP = (("forward", 10, 20), ("backward", 20, 40), ("forward", 40, 45), ("backward", 45, 50), ("update", 60, 62))


def test_computing_is_counted_in_its_stage_of_its_step():
    from gradcast.diagnosis.launching import by_stage, stretches

    # One of them reaches from forward into backward, one lies between stages, one is longer than its stage.
    operations = stretches(spans((0.5, 2.5), (11, 13), (18, 25), (44, 47), (51, 59), (59.5, 70)))
    found = by_stage(marks(*FIRST, *STEP), operations, [], {})
    assert found == {"forward": [pytest.approx(2 + 2 + 1)], "backward": [pytest.approx(5 + 2)], "update": [2.0]}


def test_what_recording_costs_is_taken_off_by_where_it_was_spent():
    from gradcast.diagnosis.launching import by_stage, stretches

    # Ten events in 10 ms where 6 are usual: 4 ms of recording, of which 3 of 10 lie inside an operation.
    operations = spans((1011, 1015), (1011.5, 1012), (1012, 1013), (1013, 1014))
    recordings = sorted([each.begin_ns for each in operations] + [1018 * MS] * 6)
    stages = (("forward", 1010, 1020), ("backward", 1020, 1021), ("update", 1021, 1022))
    usual = {"forward": 6.0, "backward": 1.0, "update": 5.0}
    found = by_stage(marks(*FIRST, *stages), stretches(operations), recordings, usual)
    assert found == {"forward": [pytest.approx(4 - 4 * 3 / 10)], "backward": [0.0], "update": [0.0]}
    assert by_stage(marks(*FIRST, *stages), stretches(operations), recordings, {})["forward"] == [4.0]


class Waits(torch.autograd.Function):
    @staticmethod
    def forward(context, value, seconds):
        context.seconds = seconds
        time.sleep(seconds)
        return value.clone()

    @staticmethod
    def backward(context, gradient):
        time.sleep(2 * context.seconds)
        return gradient, None


class Slow(nn.Module):
    """Operations take 20 ms in forward and 40 in backward, Python between them 300 in forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, value):
        time.sleep(0.3)
        return Waits.apply(self.linear(value), 0.02)


class Optimizer(torch.optim.SGD):
    """Python takes 300 ms."""

    def step(self):
        time.sleep(0.3)
        super().step()


class Prober:
    """As the doctor's, on one process."""

    def __init__(self, module, optimizer):
        from gradcast.diagnosis import probes

        self.module, self.optimizer = module, optimizer
        self._stage = lambda name, times: probes.Prober._stage(self, name, times)
        self._now_ns = time.perf_counter_ns

    def steps(self, model, count):
        assert model is self.module
        for _ in range(count):
            times = dict.fromkeys(("forward", "backward", "update"), 0.0)
            with self._stage("forward", times):
                output = model(torch.ones(2, 8))
            with self._stage("backward", times):
                output.sum().backward()
            with self._stage("update", times):
                self.optimizer.step()
        return times


def test_python_between_operations_is_no_computing():
    from gradcast.diagnosis import launching

    module = Slow()
    prober = Prober(module, Optimizer(module.parameters(), lr=0.1))
    usual_ms = prober.steps(module, 1)
    assert not launching.runs()
    found = launching.computing_ms(prober, module, torch.device("cpu"), usual_ms)
    assert not launching.runs()
    assert {stage: len(ms) for stage, ms in found.items()} == {"forward": 4, "backward": 4, "update": 4}
    # What sleeps takes as long as asked for, or longer.
    assert min(found["forward"]) >= 20
    assert min(found["backward"]) >= 40
    assert usual_ms["forward"] >= 320 > 300 > min(found["forward"])
    assert usual_ms["update"] >= 300 > min(found["update"])


def test_a_profiler_that_runs_is_seen():
    from gradcast.diagnosis import launching

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        assert launching.runs()
    assert not launching.runs()
