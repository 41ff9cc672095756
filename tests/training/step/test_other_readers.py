"""Whoever reads parameters in unusual ways, at unusual moments: DDP's values, bit for bit."""

import copy
import functools
import os
import signal
import struct

import pytest

from training import compare
from training.needs import torch
from training.pair import Pair, differences, net
from training.pool import on_ranks

nn, func = torch.nn, torch.func


class Child:
    """A forked process that reads the module's parameters in shared memory."""

    def __init__(self, module):
        self.asked, ask = os.pipe()
        answer, self.answered = os.pipe()
        self.ask, self.answer, self.pid = ask, answer, os.fork()
        if self.pid == 0:
            while os.read(self.asked, 1) == b"?":
                total = sum(float(p.detach().double().sum()) for p in module.parameters())
                os.write(self.answered, struct.pack("d", total))
            os._exit(0)

    def read(self):
        os.write(self.ask, b"?")
        return struct.unpack("d", os.read(self.answer, 8))[0]

    def end(self):
        os.write(self.ask, b".")
        os.waitpid(self.pid, 0)


def read_by_a_child(side):
    module = net().share_memory()
    child = Child(module)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    called = side.called(module, optimizer, policy="fifo")
    seen = []
    for number in range(8):
        optimizer.zero_grad()
        called(side.batch(number)).square().sum().backward()
        optimizer.step()
        seen.append(child.read())
    child.end()
    return seen, side.result(module, optimizer)


@on_ranks(2)
def test_a_process_that_shares_the_parameters_memory(rank):
    return differences(rank, read_by_a_child, "overlap")


class Late(nn.Module):
    """Registers a buffer in its first forward pass, and gives a value to one that was None."""

    def __init__(self, also_early):
        super().__init__()
        self.layer = nn.Linear(6, 2)
        self.register_buffer("none", None)
        if also_early:
            self.register_buffer("early", torch.zeros(2))

    def forward(self, x):
        if not hasattr(self, "late"):
            self.register_buffer("late", x.mean(0)[:2].detach())
            self.none = x.sum(0)[:2].detach()
        out = self.layer(x) + self.late + self.none
        self.late = 0.5 * self.late + out.mean(0).detach()
        return out


def with_late_buffers(side, also_early):
    torch.manual_seed(0)
    module = Late(also_early)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    called = side.called(module, optimizer, policy="fifo")
    return side.trained(called, module, optimizer), module.late.tolist(), module.none.tolist()


@pytest.mark.parametrize("also_early", [False, True])
@on_ranks(2)
def test_a_buffer_registered_in_forward_is_sent_if_there_were_others(rank, mode, also_early):
    return differences(rank, with_late_buffers, mode, also_early)


def loss_of(module, parameters, x):
    return func.functional_call(module, parameters, (x,)).square().sum()


def of_inputs(transform):
    """The module as it is, as a function of its inputs."""
    return lambda module, x: transform(lambda value: module(value).square().sum())(x)


def of_parameters(transform):
    """The loss as a function of the module's own parameters."""
    return lambda module, x: transform(lambda p: loss_of(module, p, x))(dict(module.named_parameters()))


def jvp(module, x):
    named = dict(module.named_parameters())
    return func.jvp(lambda p: loss_of(module, p, x), (named,), ({n: torch.ones_like(p) for n, p in named.items()},))


def vjp(module, x):
    output, back = func.vjp(lambda p: loss_of(module, p, x), dict(module.named_parameters()))
    return output, back(torch.ones_like(output))


def ensemble(module, x):
    """Two copies of the parameters, of which vmap makes one pass."""
    stacked, _ = func.stack_module_state([module, copy.deepcopy(module)])
    return func.vmap(lambda p: loss_of(module, p, x))(stacked)


def per_sample(module, x):
    """Gradients of each sample, as in differential privacy."""
    compute = func.grad(lambda p, each: loss_of(module, p, each[None]))
    return func.vmap(compute, in_dims=(None, 0))(dict(module.named_parameters()), x)


def dual(module, x):
    with torch.autograd.forward_ad.dual_level():
        out = module(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        return torch.autograd.forward_ad.unpack_dual(out).tangent.clone()


TRANSFORMS = {
    "grad": of_parameters(func.grad), "jacrev": of_parameters(func.jacrev), "jacfwd of inputs": of_inputs(func.jacfwd),
    "grad of inputs": of_inputs(func.grad), "jacrev of inputs": of_inputs(func.jacrev),
    "hessian of inputs": of_inputs(func.hessian), "vmap": lambda module, x: func.vmap(module)(x),
    "functionalize": of_inputs(func.functionalize), "jvp": jvp, "vjp": vjp, "ensemble": ensemble,
    "per sample": per_sample,
    "linearize": lambda module, x: func.linearize(module, x)[1](torch.ones_like(x)),
    "autograd.functional": lambda module, x: torch.autograd.functional.hessian(lambda v: module(v).square().sum(), x),
    "forward mode": dual,
}  # fmt: skip


HELD = pytest.mark.skipif(
    torch.__version__ >= "2.15", reason="torch 2.15 goes on holding what linearize() has looked at: no update is late"
)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[HELD] if each == "linearize" else []) for each in TRANSFORMS]
)
@on_ranks(2)
def test_function_transforms_read_finished_parameters(rank, name):
    """Of the attached module itself, and of a part of it."""
    pair, seen = Pair(rank, "plain", "adam plain", policy="fifo"), []
    for number in range(8):
        pair.pending_step()
        x = torch.randn(3, 12, generator=torch.Generator().manual_seed(number))
        for module in pair.modules:
            found = TRANSFORMS[name](module[0] if number % 2 else module, x)
            seen.append([each.detach().clone() for each in torch.utils._pytree.tree_leaves(found)])
            del found  # a graph that is kept holds the parameters' memory
    return pair.differences() + compare.trees(seen[1::2], seen[::2], name)


@on_ranks(2)
def test_new_parameters_are_first_met_inside_a_transform(rank, mode):
    pair = Pair(rank, "plain", "adam plain", mode=mode)
    pair.train(5)
    for side in pair.sides:
        torch.manual_seed(5)
        side.module.append(nn.Linear(10, 10, bias=False))
        side.optimizer.add_param_group({"params": list(side.module[-1].parameters())})
        func.jacrev(side.module)(torch.ones(3, 12))
    pair.theirs.wrap()
    pair.train(5)
    return pair.differences()


@on_ranks(2)
def test_gradients_kept_apart_arrive_inside_a_transform(rank, mode):
    pair, x = Pair(rank, "plain", "adam plain", mode=mode, policy="fifo"), torch.ones(3, 12)
    for number, side in pair.rounds(8):
        if number % 2 == 0:
            side.optimizer.zero_grad(set_to_none=False)
        for parameter in side.module.parameters():
            if parameter.grad is not None:
                parameter.grad.data = parameter.grad.data.clone()
        side.loss().backward()
        func.hessian(lambda v, module=side.module: module(v).square().sum())(x)
        if number % 2:
            side.optimizer.step()
    return pair.differences()


class Raises(torch.optim.Adam):
    """Somebody sends the process a signal in the middle of an update. Of the class, since an optimizer's own attributes
    are those of when ``step()`` was called."""

    number: int | None = None

    @torch.no_grad()
    def step(self, closure=None):
        number, Raises.number = Raises.number, None
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in parameters:
            p.add_(1.0)
        if number is not None:
            signal.raise_signal(number)
        for p in parameters:
            p.sub_(1.0)
        return super().step(closure)


def saving(module, optimizer, saved, *_):
    """What a handler that saves a checkpoint does."""
    saved.append(copy.deepcopy([module.state_dict(), optimizer.state_dict()]))


def saved_by_a_handler(side, number):
    module, saved = net(), []
    optimizer = Raises(module.parameters(), lr=1e-2)
    called = side.called(module, optimizer, policy="fifo")
    before = signal.signal(number, functools.partial(saving, module, optimizer, saved))
    try:
        for step in range(12):
            optimizer.zero_grad()
            loss = called(side.batch(step)).square().sum()
            loss.backward()
            optimizer.step()
            if side.name != "ddp" and step > 4:
                Raises.number = number  # in the middle of the first update that runs from now on
            else:
                saving(module, optimizer, saved)
            float(module[0].weight.sum())
            assert Raises.number is None
    finally:
        signal.signal(number, before)
    return saved, side.result(module, optimizer)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGALRM, signal.SIGRTMIN])
@on_ranks(2)
def test_a_handler_that_saves_finds_whole_steps(rank, number):
    """In the middle of an update it is called when the update has ended."""
    return differences(rank, saved_by_a_handler, "overlap", number)


INTERVAL_S = 0.0113


def saved_at_any_moment(side):
    """Whatever the program is doing."""
    torch.manual_seed(0)
    module, saved = net(), []
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    called = side.called(module, optimizer, policy="fifo")
    before = signal.signal(signal.SIGALRM, functools.partial(saving, module, optimizer, saved))
    signal.setitimer(signal.ITIMER_REAL, INTERVAL_S, INTERVAL_S)
    try:
        for step in range(25):
            optimizer.zero_grad()
            called(side.batch(step)).square().sum().backward()
            optimizer.step()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    return side.result(module, optimizer)


@on_ranks(2)
def test_a_handler_that_saves_at_any_moment_changes_nothing(rank, mode):
    return differences(rank, saved_at_any_moment, mode)
