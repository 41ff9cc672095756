"""What a call of the optimizer costs beside what it updates, from warm-up steps that update in several calls."""

import contextlib
import time
from unittest import mock

import pytest

from gradcast.training.measure.clocks import HostClock
from gradcast.training.measure.stopwatch import Stopwatch
from training.attached import attach, planning
from training.inside import session_of
from training.needs import torch
from training.pool import on_ranks
from training.step.test_late_device import late_device

nn = torch.nn
CALL_NS = 10**12


def measured(*updates):
    """``updates``: of each step, its calls and the time that the update takes."""
    watch = Stopwatch(torch.device("cpu"), 0)
    now = [0]
    watch._clock.stamp = lambda: now[0]
    for calls, update_ns in ((1, 500), *updates):  # the first one does not count
        watch.backward_started()
        now[0] += 100
        watch.backward_ended()
        with watch.timed("update"):
            now[0] += update_ns
        watch.updated_in(calls)
        now[0] += 70
    watch.backward_started()
    return watch.medians([], 0.0, {})


def test_calls_of_one_step_are_held_against_those_of_others():
    found = measured((1, 100), (4, 160), (1, 104), (4, 170), (1, 98))
    assert found.part_ns == pytest.approx((160 - 98) / 3)
    compute = found.compute[:-1]  # the last step has not ended
    assert [round(each.update_ns) for each in compute] == [100, 98, 104, 108, 98], "as in one call"
    assert {each.forward_ns for each in compute} == {70.0}


@pytest.mark.parametrize("updates", [[(1, 100), (1, 200)], [(4, 90), (1, 100)] * 2, [(1, 100), (4, 500), (1, 100)]])
def test_nothing_is_found_where_nothing_shows_it(updates):
    assert measured(*updates).part_ns == 0


class SlowToCall(torch.optim.SGD):
    """Each call takes 1,000 s on the clock of the warm-up, which no busy machine hides."""

    spent_ns = 0

    def step(self, closure=None):
        SlowToCall.spent_ns += CALL_NS
        return super().step(closure)


@pytest.mark.parametrize(("device", "optimizers"), [("cpu", 1), ("late", 1), ("cpu", 2)])
@on_ranks(2)
def test_the_warm_up_measures_it_of_a_single_optimizer(rank, device, optimizers):
    with late_device() if device == "late" else contextlib.nullcontext():
        module = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
        parameters = list(module.parameters())
        sgds = [SlowToCall(parameters[first::optimizers], lr=0.1) for first in range(optimizers)]
        handle = attach(module, sgds, plan=planning(warmup_steps=5))
    controller = session_of(handle).controller
    stamp = mock.Mock(side_effect=lambda: time.perf_counter_ns() + SlowToCall.spent_ns)
    with mock.patch.object(HostClock, "stamp", stamp):
        for _ in range(6):  # five measure
            for sgd in sgds:
                sgd.zero_grad()
            module(torch.ones(4, 8)).sum().backward()
            for sgd in sgds:
                sgd.step()
    handle.flush()
    assert controller.warmup is None
    measured_ns = controller.agreed.profile.part_ns
    assert measured_ns == pytest.approx(CALL_NS if optimizers == 1 else 0, rel=0.01)
    state = handle.state_dict()
    handle.load_state_dict(state)
    assert controller.agreed.profile.part_ns == measured_ns, "on every rank"
