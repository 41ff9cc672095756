"""Where nothing can be gained and DDP cannot reduce by itself, the ranks measure nothing, and ``step()`` is the
optimizer's own; from time to time they look again."""

import contextlib
import itertools
from unittest import mock

import pytest

from gradcast import _core
from training.attached import heard, planning
from training.inside import session_of
from training.needs import torch
from training.pair import differences, net
from training.plan.test_handover import STEPS, resting_for, soon
from training.pool import on_ranks

pytest.importorskip("training.needs")
from gradcast.training.plan import loop
from gradcast.training.plan.step_meter import StepMeter
from gradcast.training.ranks.step_reports import StepReports
from gradcast.training.sessions.step_cycle import StepCycle

nn = torch.nn
SGD = torch.optim.SGD


class Bare:
    """A training of a bare module. ``rests``: whether each step with gradcast has rested."""

    def __init__(self, side, module=None, **options):
        self.side, self.module, self.rests = side, module or net(), []
        self.optimizer = SGD(self.module.parameters(), lr=0.01, momentum=0.9)
        finds = {"find_unused_parameters": True}
        self.called = side.called(self.module, self.optimizer, ddp_options=finds, plan=planning(adapt=True), **options)

    @property
    def no_sync(self):
        return (self.side.handle or self.called).no_sync

    def backward(self, number):
        self.called(self.side.batch(number)).square().sum().backward()

    def step(self):
        self.optimizer.step()
        self.note()

    def note(self):
        if self.side.handle is not None:
            self.rests.append(session_of(self.side.handle).controller.rests)

    def result(self):
        if self.side.handle is not None:
            assert list(zip(self.rests, self.rests[1:], strict=False)).count((True, False)) >= 2, self.rests
        return self.side.result(self.module, self.optimizer)


def plain(side, set_to_none):
    training = Bare(side)
    for number in range(STEPS):
        training.optimizer.zero_grad(set_to_none=set_to_none)
        training.backward(number)
        training.step()
    return training.result()


def micro_batches(side):
    training = Bare(side)
    for number in range(STEPS):
        training.optimizer.zero_grad()
        with training.no_sync():
            training.backward(100 + number)
        training.backward(number)
        training.step()
    return training.result()


def clipped_by_the_program(side):
    training, norms = Bare(side), []
    for number in range(STEPS):
        training.optimizer.zero_grad()
        training.backward(number)
        norms.append(nn.utils.clip_grad_norm_(training.module.parameters(), 0.1).clone())
        training.step()
    return training.result(), norms


def closures(side):
    training = Bare(side)
    for number in range(STEPS):

        def closure(number=number):
            training.optimizer.zero_grad()
            training.backward(number)

        training.optimizer.step(closure)
        training.note()
    return training.result()


class Branched(nn.Module):
    is_whole = True

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.branch = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, value):
        value = self.trunk(value)
        return self.branch(value) if self.is_whole else value


def parameters_left_out(side):
    """On one rank, or on both; DDP needs find_unused_parameters for that."""
    training = Bare(side, Branched())
    for number in range(STEPS):
        training.optimizer.zero_grad()
        training.module.is_whole = number % 3 == side.rank
        training.backward(number)
        training.step()
    return training.result()


def saved_in_between(side):
    """With the optimizer's state, and gradients read before step()."""
    training, saved = Bare(side), []
    for number in range(STEPS):
        training.optimizer.zero_grad()
        training.backward(number)
        saved.append([parameter.grad.clone() for parameter in training.module.parameters()])
        training.step()
        saved.append(torch.cat([each.flatten() for each in training.optimizer.state_dict()["state"][0].values()]))
        saved.append({name: each.clone() for name, each in training.module.state_dict().items()})
    return training.result(), saved


def weighted(side):
    training = Bare(side)
    for number in range(STEPS):
        training.optimizer.zero_grad()
        handle = side.handle
        with contextlib.nullcontext() if handle is None else handle.weight(2):
            training.backward(number)
        training.step()
    return training.result()


@pytest.mark.parametrize("mode", ["overlap", pytest.param("hook", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        (plain, (True,)),
        (plain, (False,)),
        (micro_batches, ()),
        (clipped_by_the_program, ()),
        (closures, ()),
        (parameters_left_out, ()),
        (saved_in_between, ()),
        (weighted, ()),
    ],
)
@on_ranks(2)
def test_the_bits_are_those_of_ddp(rank, mode, program, arguments):
    with soon():
        return differences(rank, program, mode, *arguments)


def counted(owner, name):
    return mock.patch.object(owner, name, autospec=True, side_effect=getattr(owner, name))


@pytest.mark.parametrize("mode", ["hook", "overlap"])
@on_ranks(2)
def test_nothing_is_reported_and_step_is_the_optimizers_own(rank, mode):
    def program(side):
        training, in_rest = Bare(side), [0, 0]
        for number in range(STEPS):
            before = reports.call_count, steps.call_count
            training.optimizer.zero_grad()
            training.backward(number)
            training.step()
            if training.rests[-2:] == [True, False]:
                iterations = session_of(side.handle).controller.meter.iterations
                assert not iterations, "reports of steps before the rest would count as new ones"
            if training.rests[-2:] == [True, True]:
                assert not session_of(side.handle).cycle.gradients.message.own_reports.any()
                in_rest[0] += reports.call_count - before[0]
                in_rest[1] += steps.call_count - before[1]
        assert side.handle is None or (reports.call_count > 0 and in_rest == [0, 0]), in_rest
        return training.result()

    with soon(), counted(StepReports, "exchange") as reports, counted(StepCycle, "on_step") as steps:
        return differences(rank, program, mode)


@on_ranks(2)
def test_a_change_is_found_after_a_rest(rank):
    """The reported link takes three times as long from one step on, in which nothing is reported."""
    times_ns = itertools.chain(itertools.repeat(10e6, 24), itertools.repeat(30e6))

    def facts(meter, start_ns):
        return _core.RankFacts(step_ns=50e6, busy_ns=10e6, link_ns=next(times_ns))

    def program(side):
        training = Bare(side)
        for number in range(60):
            training.optimizer.zero_grad()
            training.backward(number)
            training.step()
            if side.handle is not None:
                live = session_of(side.handle).controller
                live.new_monitor = lambda agreed: _core.Monitor(2, begins_on_baseline=agreed.runs_as_baseline)
        assert side.handle is None or any(training.rests) > any(training.rests[-20:]), training.rests
        return side.result(training.module, training.optimizer)

    own_facts = mock.patch.object(StepMeter, "_own_facts", autospec=True, side_effect=facts)
    steps = mock.patch.multiple(loop, _STEPS_UNTIL_DDP=20, _STEPS_UNTIL_DDP_AGAIN=12)
    with soon(), resting_for(8), steps, own_facts, heard() as lines:
        found = differences(rank, program, "hook")
    said = any("the network has changed" in line for line in lines)
    return found + ([] if rank.index or said else lines)


@on_ranks(2)
def test_functions_are_called_once_per_step(rank):
    """Of one rank alone: updates run inside step() while the loop rests, and in parts otherwise."""
    seen = []

    def program(side):
        training = Bare(side)
        if side.handle is not None and side.rank == 0:
            side.handle.on_update(lambda names, _: seen.extend(names))
        for number in range(STEPS):
            training.optimizer.zero_grad()
            training.backward(number)
            training.step()
        return training.result()

    with soon():
        found = differences(rank, program, "overlap")
    names = [name for name, _ in net().named_parameters()]
    expected = STEPS * len(names) if rank.index == 0 else 0
    return found + ([] if len(seen) == expected else [(len(seen), expected)])
