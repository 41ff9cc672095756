"""On a device, compute beside a plan is measured with the device's stamps, and the plan is made again for it."""

import time
from unittest import mock

import pytest

from training.attached import Attached, attach, error_of, not_refused, planning
from training.inside import session_of
from training.needs import torch
from training.pool import on_ranks
from training.step.test_late_device import late_device

pytest.importorskip("training.needs")
from gradcast.training.measure import compute_cost, stopwatch
from gradcast.training.measure.stopwatch import Stopwatch
from gradcast.training.plan import step_meter

nn = torch.nn
FORWARD_NS, BACKWARD_NS, UPDATE_NS, WAIT_NS = 10**12, 3 * 10**12, 10**11, 10**13
STEPS = 3 + 9 + 2  # the warm-up, calibration, and some


class Clock:
    """A device clock that the test moves on."""

    now_ns = 0

    def stamp(self):
        return Clock.now_ns

    def between(self, start, end):
        return float(end - start)

    def taking(self, time_ns, function):
        def call(*arguments, **named):
            Clock.now_ns += time_ns
            return function(*arguments, **named)

        return call


class Slow(torch.optim.SGD):
    def step(self, closure=None):
        Clock.now_ns += UPDATE_NS
        return super().step(closure)


@on_ranks(2)
def test_compute_beside_a_plan_is_that_of_the_device(rank, mode):
    clock = Clock()
    with late_device():
        module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        module[0].register_forward_hook(clock.taking(FORWARD_NS, lambda *_: None))
        sgd = Slow(module.parameters(), lr=0.1)
        handle = attach(module, sgd, mode, plan=planning("ddp", first_bytes=1 << 20, adapt=True))
    controller, exchange = session_of(handle).controller, session_of(handle).exchange
    controller.meter.sees_compute, controller.meter._clock = False, clock
    exchange.wait = clock.taking(WAIT_NS, exchange.wait)
    exchange.wait_all = clock.taking(WAIT_NS, exchange.wait_all)
    for _ in range(STEPS):
        sgd.zero_grad()
        output = module(torch.ones(4, 8))
        output.register_hook(clock.taking(BACKWARD_NS, lambda _: None))
        output.sum().backward()
        sgd.step()
    handle.flush()
    profile, update_ns = controller.profile, UPDATE_NS if mode == "overlap" else 0  # in hook mode it is the program's
    assert profile.backward_ns == pytest.approx(BACKWARD_NS)
    assert profile.forward_ns == pytest.approx(FORWARD_NS + UPDATE_NS - update_ns)
    assert sum(tensor.update_ns for tensor in profile.tensors) == pytest.approx(update_ns, rel=1e-3)
    assert session_of(handle).report.trace.device_clock is None, "stamps are taken only then"
    handle.detach()
    return


class SlowToCall(torch.optim.SGD):
    """Each call takes the host 1,000 s, and the device nothing."""

    spent_ns = 0

    def step(self, closure=None):
        SlowToCall.spent_ns += 10**12
        return super().step(closure)


@on_ranks(2)
def test_a_hosts_parts_are_seen_while_the_device_hides_them(rank):
    host_ns = time.perf_counter_ns
    modules = (stopwatch, step_meter)
    patches = [mock.patch.object(each, "clock_of", return_value=Clock()) for each in modules]
    with late_device(), patches[0], patches[1]:
        module = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
        sgd = SlowToCall(module.parameters(), lr=0.1)
        handle = attach(module, sgd, plan=planning(warmup_steps=5))
    controller = session_of(handle).controller
    controller.meter.sees_compute = False
    with mock.patch.object(time, "perf_counter_ns", side_effect=lambda: host_ns() + SlowToCall.spent_ns):
        for _ in range(6):  # five measure
            sgd.zero_grad()
            module(torch.ones(4, 8)).sum().backward()
            sgd.step()
    handle.flush()
    profile = controller.agreed.profile
    assert controller.warmup is None
    assert profile.part_ns == 0, "by the device's events"
    assert profile.host_part_ns == pytest.approx(10**12, rel=0.01)
    assert profile.host_step_ns == pytest.approx(10**12, rel=0.01), "one call, and little else"
    assert profile.host_block_ns == 0, "there is no stream"
    assert controller.agreed.plan.bound_ns >= profile.host_step_ns


@pytest.mark.parametrize("when", ["warm-up", "calibration"])
@on_ranks(2)
def test_what_one_rank_cannot_measure_is_an_error_on_all(rank, when):
    """No rank waits for the measurements of one whose device has failed."""
    owner, name = (Stopwatch, "medians") if when == "warm-up" else (compute_cost, "compute_of")
    attached = Attached(nn.Linear(8, 8), plan=planning(adapt=True))
    failing = mock.patch.object(owner, name, side_effect=RuntimeError("the device has failed\nand more"))
    if rank.index == 1:
        failing.start()

    def train():
        for _ in range(STEPS):
            attached.step(torch.ones(4, 8))
        attached.handle.flush()

    steps = "the warm-up's steps" if when == "warm-up" else "the plan's first steps"
    words = f"measuring {steps} failed on rank 1 of 2: RuntimeError: the device has failed"
    found = not_refused(train, words, code="communication")
    mock.patch.stopall()
    error_of(attached.handle.detach)
    return found
