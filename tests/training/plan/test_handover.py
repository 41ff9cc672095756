"""Where no plan gains anything, DDP reduces by itself, and gradcast looks again: with DDP's bits, at the same steps on
all ranks."""

import contextlib
import itertools
import threading
import time
from unittest import mock

import pytest

import gradcast
from gradcast import _core
from training.attached import heard, planning
from training.inside import session_of
from training.models import TASKS
from training.needs import torch
from training.pair import DDP, Side, differences
from training.plan.test_adapt import expectation
from training.pool import on_ranks

pytest.importorskip("training.needs")
from gradcast.training.compat import extension
from gradcast.training.plan import loop, proposals
from gradcast.training.plan.step_meter import StepMeter
from gradcast.training.sessions import handover

nn = torch.nn
STEPS = 32


@contextlib.contextmanager
def soon(gain=1.01):
    """Nothing is expected of plans, and little time passes until DDP reduces, and until gradcast looks again."""
    with (
        mock.patch.object(proposals, "expect", return_value=expectation(gain)),
        mock.patch.multiple(loop, _STEPS_UNTIL_DDP=3, _STEPS_UNTIL_DDP_AGAIN=3, _REST_STEPS=3, _REST_STEPS_MAX=5),
    ):
        yield


def resting_for(steps):
    return mock.patch.multiple(loop, _REST_STEPS=steps, _REST_STEPS_MAX=steps)


class Loop:
    """A training with DDP, the same on both sides. ``by_ddp``: of each step with gradcast, whether DDP reduced it."""

    def __init__(self, side, *, ddp=None, optimizer=torch.optim.Adam, split=None, **options):
        """``split``: of the parameters, those from there on are those of an optimizer of their own, ``second``."""
        self.side, self.by_ddp = side, []
        self.module = TASKS["plain"].module()
        self.ddp = DDP(self.module, **(ddp or {}))
        parameters = list(self.module.parameters())
        self.optimizer = optimizer(parameters[:split], lr=0.01)
        self.second = None if split is None else optimizer(parameters[split:], lr=0.01)
        both = self.optimizer if split is None else [self.optimizer, self.second]
        side.attach(self.ddp, both, plan=planning(adapt=True), **options)

    def backward(self, number):
        inputs, targets = TASKS["plain"].batch(self.side.rank, number)
        nn.functional.cross_entropy(self.ddp(inputs), targets).backward()

    def step(self, number):
        self.backward(number)
        self.optimizer.step()
        self.note()

    def note(self):
        if self.side.handle is not None:
            self.by_ddp.append(self.side.handle.stats()["reduced_by_ddp"])

    def result(self):
        return self.side.result(self.module, self.optimizer)

    def changes(self):
        """The number of times that the reduction went to DDP, and came back."""
        pairs = list(zip(self.by_ddp, self.by_ddp[1:], strict=False))
        return pairs.count((False, True)), pairs.count((True, False))


def goes_and_returns(training):
    if training.side.handle is not None:
        assert min(training.changes()) >= 2, training.by_ddp


def plain(side, set_to_none, ddp):
    training = Loop(side, ddp=ddp)
    for number in range(STEPS):
        training.optimizer.zero_grad(set_to_none=set_to_none)
        training.step(number)
    goes_and_returns(training)
    return training.result()


def no_sync(side):
    """With a backward pass whose gradients stay, and are not there where the reduction changes."""
    training = Loop(side)
    for number in range(STEPS):
        training.optimizer.zero_grad()
        for part in range(2):
            with training.ddp.no_sync():
                training.backward(100 * number + part)
        training.step(number)
    goes_and_returns(training)
    return training.result()


def kept_gradients(side):
    """The program keeps each step's gradients, without cloning them."""
    training, kept = Loop(side), []
    for number in range(STEPS):
        training.optimizer.zero_grad()
        training.step(number)
        kept.append([parameter.grad for parameter in training.module.parameters()])
    goes_and_returns(training)
    return training.result(), kept


def saved_in_between(side):
    training, saved = Loop(side), []
    for number in range(STEPS):
        training.optimizer.zero_grad()
        training.step(number)
        saved.append({name: each.clone() for name, each in training.module.state_dict().items()})
        if side.handle is not None:
            side.handle.state_dict()
    goes_and_returns(training)
    return training.result(), saved


def one_rank_slow(side):
    training = Loop(side)
    for number in range(STEPS):
        training.optimizer.zero_grad()
        if side.rank == 1:
            time.sleep(0.002 * (number % 3))
        training.step(number)
    goes_and_returns(training)
    return training.result()


def more_forwards_on_a_rank(side):
    """Rank 0 looks at outputs, and at gradients of inputs, more often than rank 1."""
    training = Loop(side)
    for number in range(STEPS):
        training.optimizer.zero_grad()
        if side.rank == 0 and number % 3 == 0:
            inputs = TASKS["plain"].batch(0, number)[0].requires_grad_()
            torch.autograd.grad(training.ddp(inputs).sum(), inputs)
        training.step(number)
    goes_and_returns(training)
    return training.result()


def hooks_of_the_program(side):
    training, seen = Loop(side), []
    for parameter in training.module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for number in range(STEPS):
        training.optimizer.zero_grad()
        training.step(number)
    goes_and_returns(training)
    return training.result(), seen


class Branched(nn.Module):
    """Leaves ``branch`` out unless ``is_whole``."""

    is_whole = True

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.branch = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), nn.Linear(6, 6)

    def forward(self, value):
        value = self.trunk(value)
        return self.branch(value) if self.is_whole else value


def passes_past_ddp(side):
    """While DDP reduces, and where gradcast takes the reduction back. In some steps they use what the reduced pass
    leaves out: its gradient is averaged then, and only then."""
    module = Branched()
    ddp = DDP(module, find_unused_parameters=True)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    side.attach(ddp, sgd, plan=planning(adapt=True))
    by_ddp = []
    with resting_for(10):
        for number in range(STEPS):
            sgd.zero_grad()
            module.is_whole = bool(number % 3)
            if number > 20:
                module(side.batch(number)).square().sum().backward()
            module.is_whole = False
            ddp(side.batch(number)).square().sum().backward()
            sgd.step()
            by_ddp.append(side.handle is not None and side.handle.stats()["reduced_by_ddp"])
    assert side.handle is None or (by_ddp[22] and not by_ddp[-1]), by_ddp
    return side.result(module)


def late_buffer(side):
    """Registered after DDP was made of a module without any: DDP does not send it."""
    training = Loop(side)
    training.module.register_buffer("late", torch.full((3,), float(side.rank)))
    for number in range(STEPS):
        training.optimizer.zero_grad()
        training.step(number)
    goes_and_returns(training)
    return training.result(), training.module.late.clone()


def frozen_for_a_while(side):
    """While DDP reduces, for long, and would raise in the next step; gradcast takes the reduction back."""
    training = Loop(side, ddp={"find_unused_parameters": side.name == "ddp"})
    first = next(training.module.parameters())
    with resting_for(100):
        for number in range(STEPS):
            training.optimizer.zero_grad()
            first.requires_grad_(number not in (25, 26))
            training.step(number)
    assert side.handle is None or training.by_ddp[24:27] == [True, False, False]
    return training.result()


def two_steps_of_backward(side):
    """Without step() in between: DDP averages the sum again, and the loop drops it."""
    training = Loop(side)
    for number in range(STEPS):
        training.optimizer.zero_grad()
        if number % 4 == 0:
            training.backward(1000 + number)
        training.step(number)
    goes_and_returns(training)
    return training.result()


def closures(side):
    """Forward and backward run inside step(), of the first of two optimizers; some gradients are never taken."""
    training = Loop(side, split=3)
    for number in range(STEPS):

        def closure(number=number):
            training.optimizer.zero_grad()
            training.backward(number)

        if number % 3 == 0:
            closure()
        training.optimizer.step(closure)
        if number % 2:
            training.second.step()
        training.note()
    goes_and_returns(training)
    return training.result()


@pytest.mark.parametrize("mode", ["overlap", pytest.param("hook", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        (plain, (True, {})),
        (plain, (False, {})),
        (plain, (True, {"gradient_as_bucket_view": True})),
        (plain, (False, {"gradient_as_bucket_view": True})),
        (plain, (True, {"static_graph": True})),
        (plain, (True, {"find_unused_parameters": True})),
        (no_sync, ()),
        (kept_gradients, ()),
        (saved_in_between, ()),
        (one_rank_slow, ()),
        (more_forwards_on_a_rank, ()),
        (hooks_of_the_program, ()),
        (passes_past_ddp, ()),
        (late_buffer, ()),
        (frozen_for_a_while, ()),
        (two_steps_of_backward, ()),
        (closures, ()),
    ],
)
@on_ranks(2)
def test_the_bits_are_those_of_ddp(rank, mode, program, arguments):
    with soon():
        return differences(rank, program, mode, *arguments)


@pytest.mark.parametrize("mode", ["hook", "overlap"])
@on_ranks(2)
def test_nothing_of_gradcast_is_left_in_a_step_of_ddp(rank, mode):
    """No hook behind a gradient, no buffer. And gradcast sees each other step() of a function that the program kept."""

    def program(side):
        training = Loop(side)
        step = training.optimizer.step
        for number in range(STEPS):
            training.backward(number)
            step()
            training.note()
            if side.handle is not None:
                assert side.handle.stats()["step"] == number + 1
            if side.handle is not None and training.by_ddp[-1]:
                assert extension.load().own_hooks(list(training.module.parameters())) == []
                assert session_of(side.handle).exchange.buffers.flats == []
        goes_and_returns(training)
        return training.result()

    with soon():
        return differences(rank, program, mode)


REASONS = {
    "clipping": ({"clip": gradcast.Clip(norm=1e6)}, "are gradcast's"),
    "comparing": ({"compare_every": 2}, "are gradcast's"),
}


@pytest.mark.parametrize("name", REASONS)
@on_ranks(2)
def test_what_only_gradcast_does_keeps_the_reduction(rank, name):
    options, words = REASONS[name]

    def program(side):
        training = Loop(side, **options)
        for number in range(STEPS):
            training.optimizer.zero_grad()
            training.backward(number)
            if side.handle is None and name == "clipping":
                nn.utils.clip_grad_norm_(training.module.parameters(), 1e6)
            training.optimizer.step()
            training.note()
        assert not any(training.by_ddp)
        return training.result()

    with soon(), heard() as lines:
        found = differences(rank, program, "overlap")
    return found + ([] if rank.index or any(words in line for line in lines) else lines)


@on_ranks(2)
def test_a_living_graph_keeps_the_reduction_on_all_ranks(rank):
    """Rank 1 keeps the output of a forward pass, through which backward may come later."""

    def program(side):
        training, kept = Loop(side), []
        for number in range(20):
            if side.rank == 1 and side.handle is not None:
                kept = [training.ddp(TASKS["plain"].batch(1, number)[0])]
            training.optimizer.zero_grad()
            training.step(number)
        assert not any(training.by_ddp), (training.by_ddp, kept)
        return training.result()

    with soon():
        return differences(rank, program, "overlap")


TRIALS = {"faster plan": (40, False), "slower plan": (10, True)}


@pytest.mark.parametrize("mode", ["hook", "overlap"])
@pytest.mark.parametrize("name", TRIALS)
@on_ranks(2)
def test_a_plan_is_compared_with_ddp_itself(rank, mode, name):
    """Steps of the plan are said to take 20 ms, and those of DDP as long as ``TRIALS`` says."""
    ddp_ms, gives_up = TRIALS[name]
    facts = _core.RankFacts(step_ns=20e6, busy_ns=10e6, link_ns=10e6)
    clock = itertools.count(0, int(ddp_ms * 1e6))

    def program(side):
        training = Loop(side)
        if side.handle is not None:
            live = session_of(side.handle).controller
            live.new_monitor = lambda agreed: _core.Monitor(2, begins_on_baseline=agreed.runs_as_baseline)
        for number in range(90):
            training.optimizer.zero_grad()
            training.step(number)
        if side.handle is not None:
            there, back = training.changes()
            assert (there, back) >= (3, 3) if gives_up else (there, back) == (1, 1), training.by_ddp
            stats = side.handle.stats()
            assert stats["measured_gain"] == pytest.approx(ddp_ms / 20)
            assert stats["runs_as_ddp"] == gives_up
        return training.result()

    now = mock.Mock(perf_counter_ns=lambda: next(clock))
    own_facts = mock.patch.object(StepMeter, "_own_facts", return_value=facts)
    with soon(gain=1.5), own_facts, mock.patch.object(handover, "time", now):
        return differences(rank, program, mode)


def weighted(handle):
    return handle.weight(2)


def loading(handle):
    handle.load_state_dict(handle.state_dict())
    return contextlib.nullcontext()


@pytest.mark.parametrize("call", [weighted, loading])
@pytest.mark.parametrize("mode", ["overlap", pytest.param("hook", marks=pytest.mark.slow)])
@on_ranks(2)
def test_calls_that_need_gradcast_take_the_reduction_back(rank, mode, call):
    """Also between forward and backward."""

    def program(side):
        training = Loop(side)
        for number in range(STEPS):
            training.optimizer.zero_grad()
            inputs, targets = TASKS["plain"].batch(side.rank, number)
            loss = nn.functional.cross_entropy(training.ddp(inputs), targets)
            needed = number >= 20 and side.handle is not None
            with call(side.handle) if needed else contextlib.nullcontext():
                loss.backward()
            training.optimizer.step()
            training.note()
        if side.handle is not None:
            assert training.by_ddp[19:21] == [True, False], training.by_ddp
        return training.result()

    with soon(), resting_for(100):
        return differences(rank, program, mode)


@pytest.mark.parametrize("mode", ["overlap", pytest.param("hook", marks=pytest.mark.slow)])
@on_ranks(2)
def test_functions_that_come_meanwhile_are_called_with_each_step(rank, mode):
    """On one rank alone."""
    side = Side(mode, rank.index)
    with soon(), resting_for(100):
        training, updated, steps = Loop(side), [], []
        number = 0
        while not (training.by_ddp and training.by_ddp[-1]):
            training.step(number)
            number += 1
        if rank.index == 0:
            side.handle.on_update(lambda names, _: updated.extend(names))
            side.handle.on_step(steps.append)
        for _ in range(3):
            training.step(number)
        side.handle.detach()
    names = [name for name, _ in training.module.named_parameters()]
    expected = (3 * names, 3) if rank.index == 0 else ([], 0)
    return [] if (updated, len(steps)) == expected else [(updated, steps)]


@pytest.mark.parametrize("mode", ["overlap", pytest.param("hook", marks=pytest.mark.slow)])
@on_ranks(2)
def test_it_can_be_detached_while_ddp_reduces(rank, mode):
    def program(side):
        training = Loop(side)
        for number in range(STEPS):
            training.optimizer.zero_grad()
            training.step(number)
            if training.by_ddp and training.by_ddp[-1]:
                side.handle.detach()
                side.handles.clear()
                training.by_ddp.clear()
        return training.result()

    with soon():
        return differences(rank, program, mode)


@on_ranks(2)
def test_a_rank_that_ddp_waits_for_is_named(rank):
    """Once; and not by the rank that computes for long meanwhile."""
    side = Side("overlap", rank.index)
    with soon(), resting_for(100), heard() as lines:
        training = Loop(side, watch=gradcast.Watch(stall_warning_s=0.2))
        number = 0
        while not (training.by_ddp and training.by_ddp[-1]):
            training.step(number)
            number += 1
        if rank.index == 0:
            threading.Thread(target=lambda: signal_once_named(rank, lines), daemon=True).start()
        else:
            rank.wait_for("named")
        for _ in range(3):
            training.step(number)
        side.handle.detach()
    named = [line for line in lines if "DDP" in line and "rank 1 has not responded" in line]
    return [] if len(named) == 1 - rank.index else lines


def signal_once_named(rank, lines):
    while not any("rank 1 has not responded" in line for line in lines):
        time.sleep(0.02)
    rank.signal("named")
