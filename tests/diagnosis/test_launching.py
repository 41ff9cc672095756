"""Launch overhead: how long operations run in a step of the doctor, and how much time passes between them."""

import concurrent.futures
import contextlib
import time
from types import SimpleNamespace
from unittest import mock

import pytest

from training.needs import torch

# isort: split
from doctor.train import Waits
from gradcast.diagnosis.probe import launch_overhead, prober
from gradcast.diagnosis.probe.launch_overhead import Interval, busy_intervals, by_stage

nn = torch.nn
MS = 1e6


def spans(*pairs):
    return [Interval(begin * MS, end * MS) for begin, end in pairs]


def test_operations_inside_of_others_and_beside_them_count_once():
    found = busy_intervals(spans((20, 30), (0, 10), (2, 4), (3, 5), (25, 40), (50, 50)))
    assert found == [Interval(0, 10 * MS, 2), Interval(20 * MS, 40 * MS, 1), Interval(50 * MS, 50 * MS, 0)]
    assert busy_intervals([]) == []


def marks(*stages):
    return [(stage, span) for (stage, *ends) in stages for span in spans(tuple(ends))]


FIRST = (("forward", 0, 1), ("backward", 1, 2), ("update", 2, 3)) * 2  # steps that are left out
STEP = (("forward", 10, 20), ("backward", 20, 40), ("forward", 40, 45), ("backward", 45, 50), ("update", 60, 62))


def test_computing_is_counted_in_its_stage_of_its_step():
    # One of them reaches from forward into backward, one lies between stages, one is longer than its stage.
    operations = busy_intervals(spans((0.5, 2.5), (11, 13), (18, 25), (44, 47), (51, 59), (59.5, 70)))
    found = by_stage(marks(*FIRST, *STEP), operations, [], {})
    assert found == {"forward": [pytest.approx(2 + 2 + 1)], "backward": [pytest.approx(5 + 2)], "update": [2.0]}


def test_what_recording_costs_is_taken_off_by_where_it_was_spent():
    # Ten events in 10 ms where 6 are usual: 4 ms of recording, of which 3 of 10 lie inside an operation.
    operations = spans((1011, 1015), (1011.5, 1012), (1012, 1013), (1013, 1014))
    recordings = sorted([each.begin_ns for each in operations] + [1018 * MS] * 6)
    stages = (("forward", 1010, 1020), ("backward", 1020, 1021), ("update", 1021, 1022))
    usual = {"forward": 6.0, "backward": 1.0, "update": 5.0}
    found = by_stage(marks(*FIRST, *stages), busy_intervals(operations), recordings, usual)
    assert found == {"forward": [pytest.approx(4 - 4 * 3 / 10)], "backward": [0.0], "update": [0.0]}
    assert by_stage(marks(*FIRST, *stages), busy_intervals(operations), recordings, {})["forward"] == [4.0]


def test_what_recording_costs_is_that_of_a_step_not_of_a_pass():
    # Two passes of 10 ms, 5 usually: all of it is computing, in an operation with nine others inside.
    operations = spans((1000, 1010), (1020, 1030)) + spans(*((1000 + i, 1001 + i) for i in (*range(9), *range(20, 29))))
    stages = (("forward", 1000, 1010), ("forward", 1020, 1030), ("update", 1040, 1041))
    recordings = sorted(each.begin_ns for each in operations)
    found = by_stage(marks(*FIRST, *stages), busy_intervals(operations), recordings, {"forward": 10.0})
    assert found["forward"] == [pytest.approx(20 - 10 * 18 / 20)]


class Slow(nn.Module):
    """Operations take 20 ms in forward and 40 in backward; Python between them takes 300 ms in forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, value):
        time.sleep(0.3)
        return Waits.apply(self.linear(value), 20)


class Optimizer(torch.optim.SGD):
    """Its Python code takes 300 ms."""

    def step(self):
        time.sleep(0.3)
        super().step()


class Prober:
    """Like the doctor's, on one process."""

    now_ns = staticmethod(time.perf_counter_ns)
    timed_stage = prober.Prober.timed_stage

    def __init__(self, module):
        self.module, self.optimizer = module, Optimizer(module.parameters(), lr=0.1)
        self.made = 0

    def turn(self, model):
        assert model is self.module
        for _ in range(5):  # two are left out
            times = dict.fromkeys(("forward", "backward", "update"), 0.0)
            with self.timed_stage("forward", times):
                output = model(torch.ones(2, 8))
            with self.timed_stage("backward", times):
                output.sum().backward()
            with self.timed_stage("update", times):
                self.optimizer.step()
            self.made += 1
        return times


def computing():
    """Makes five steps, and returns what is told of them."""
    slow = Prober(Slow())
    found = launch_overhead.computing_ms(slow, slow.module, torch.device("cpu"), {})
    assert slow.made == 5
    return found


def test_python_between_operations_is_no_computing():
    found = computing()
    assert {stage: len(ms) for stage, ms in found.items()} == {"forward": 3, "backward": 3, "update": 3}
    # What sleeps takes as long as asked for, or longer.
    assert 20 <= min(found["forward"]) < 300
    assert min(found["backward"]) >= 40
    assert min(found["update"]) < 300
    assert torch.autograd._profiler_enabled() is torch.autograd.profiler._is_profiler_enabled is False


def profiler(**more):
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True, **more)


@pytest.mark.parametrize("in_thread", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_where_the_script_uses_the_profiler_nothing_is_told_and_the_steps_are_made(in_thread):
    scripts = profiler()
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        run = (lambda call: other.submit(call).result()) if in_thread else (lambda call: call())
        run(scripts.start)
        found = computing()
        torch.ones(2).add(1)
        run(scripts.stop)
    assert found == "torch's profiler cannot record here: the script uses it"
    if not in_thread:
        assert any(event.name == "aten::add" for event in scripts.events())


def recorded_names(rank):
    """The names of what is recorded where the backend's thread wakes this one and goes on later."""

    class Communicates:
        def turn(self, model):
            if rank.index == 1:
                time.sleep(0.05)  # so that rank 0 has said what runs at the end before the end
            future = torch.distributed.all_reduce(torch.ones(8), async_op=True).get_future()
            future.then(lambda _: time.sleep(0.02))
            future.wait()

    with mock.patch.object(launch_overhead, "from_events", lambda events, *_, **__: [each.name for each in events]):
        return launch_overhead.computing_ms(Communicates(), None, torch.device("cpu"), {})


def test_recording_stops_when_the_backend_has_ended_its_records(ranks):
    # Otherwise the record is missing, and the backend's thread writes it into memory that is free.
    for names in ranks.run(2, recorded_names):
        assert "gloo:all_reduce" in names


@pytest.mark.slow
def test_before_a_schedule_of_the_script_begins_the_steps_are_made_as_well():
    scripts = profiler(schedule=torch.profiler.schedule(wait=0, warmup=1, active=1))
    scripts.start()
    try:
        found = computing()
    finally:
        with contextlib.suppress(RuntimeError):  # torch's own, where another one has run meanwhile
            scripts.stop()
    assert isinstance(found, dict) or found.startswith("torch's profiler cannot record here: ")


def event(name, begin_ms, end_ms, *, device="CPU", scope=0, annotation=False):
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=1e3 * begin_ms, end=1e3 * end_ms),
        device_type=getattr(torch.autograd.DeviceType, device),
        scope=scope,
        is_user_annotation=annotation,
        is_async=False,
    )


def test_a_gpu_computes_while_a_kernel_runs():
    events = []
    for start in (0, 0, 100):  # the first two steps are left out
        stages = {
            "forward": (start, start + 20),
            "backward": (start + 20, start + 50),
            "update": (start + 50, start + 55),
        }
        events += [event(f"gradcast: {name}", *ends, scope=7) for name, ends in stages.items()]
        # As the device has it: the annotations again, kernels and copies. The host's launches are no computing.
        events += [event(f"gradcast: {name}", *ends, device="CUDA", annotation=True) for name, ends in stages.items()]
        kernels = {"gemm": (5, 15), "Memcpy HtoD": (14, 17), "gemm 2": (25, 45)}
        events += [event(name, start + a, start + b, device="CUDA") for name, (a, b) in kernels.items()]
        events.append(event("aten::mm", start + 21, start + 50))
    # Recording makes no kernel longer, whatever the stages take usually.
    found = launch_overhead.from_events(events, {"forward": 1.0, "backward": 1.0, "update": 1.0}, on_gpu=True)
    assert found == {"forward": [pytest.approx(12)], "backward": [pytest.approx(20)], "update": [0.0]}


MARK = event("gradcast: update", 0, 1, scope=7)
# What torch.compile does around its graphs is no operation.
COMPILED = [
    *(event("gradcast: update", 100 * step, 100 * step + 50, scope=7) for step in range(3)),
    event("Torch-Compiled Region: 0/0", 200, 250),
    event("CompiledFunction", 210, 220),
]


@pytest.mark.parametrize(
    ("events", "on_gpu", "found"),
    [
        ([], False, "torch's profiler has recorded no operations"),
        ([MARK, event("aten::mm", 0, 1)], True, "torch's profiler has recorded no kernels"),
        ([MARK, event("c10d::allreduce_", 0, 1)], False, "torch's profiler has recorded no operations"),
        (COMPILED, False, {"update": [10.0]}),
    ],
)
def test_what_is_told_of_what_the_profiler_has_seen(events, on_gpu, found):
    assert launch_overhead.from_events(events, {}, on_gpu=on_gpu) == found
