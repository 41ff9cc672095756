"""Which backward passes are reduced. Around a DDP module, DDP decides that in forward; so does gradcast."""

import contextlib
import dataclasses
from collections.abc import Callable

import pytest
from torch.utils.checkpoint import checkpoint

from training import compare
from training.attached import Attached, not_refused
from training.needs import torch
from training.pair import DDP, differences, net
from training.pool import on_ranks

nn = torch.nn


class Checkpointed(nn.Module):
    """Its first layers run again inside backward, in an autograd pass of their own."""

    def __init__(self):
        super().__init__()
        self.layers = net()

    def forward(self, x):
        hidden = checkpoint(self.layers[:3], x.requires_grad_(), use_reentrant=True)
        return self.layers[3:](hidden)


@dataclasses.dataclass
class Variant:
    """What DDP is given, or is put into."""

    options: dict = dataclasses.field(default_factory=dict)
    make: Callable = net
    wrap: Callable = lambda ddp: ddp
    begin: Callable = lambda loop: None
    without: tuple = ()  # what DDP itself does not bear


def joined(loop):
    """DDP reduces, and then gives the gradients back."""
    with loop.ddp.join():
        loop.ordinary_step()


VARIANTS = {
    "plain": Variant(),
    "unused": Variant({"find_unused_parameters": True}),
    "static": Variant({"static_graph": True}),
    "views": Variant({"gradient_as_bucket_view": True}),
    "reentrant": Variant(make=Checkpointed, without=("several_forwards",)),
    "compiled": Variant(wrap=lambda ddp: torch.compile(ddp, backend="eager")),
    "join": Variant(begin=joined),
}


class Loop:
    """A module in DDP on one side, its optimizer, and the batches of one rank."""

    def __init__(self, side, variant):
        self.side, self.module, self.begin = side, variant.make(), variant.begin
        self.ddp = DDP(self.module, **variant.options)
        self.called = variant.wrap(self.ddp)
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=1e-2)
        side.attach(self.called, self.optimizer, policy="fifo")
        self.count = 0

    def loss(self, called=None):
        self.count += 1
        return (called or self.called)(self.side.batch(self.count)).square().sum()

    def ordinary_step(self):
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    def trained(self, step, steps=6):
        """``step(number)`` makes the gradients of a step. The first one is an ordinary one: with a static graph, DDP
        reduces at the end of its first pass in any case."""
        self.ordinary_step()
        self.begin(self)
        for number in range(steps):
            self.optimizer.zero_grad()
            step(number)
            self.optimizer.step()
        return self.side.result(self.module, self.optimizer)


def no_sync_around_backward(loop):
    """As the README of a SAM optimizer has it: the first of two passes is reduced all the same."""

    def step(_):
        loss = loop.loss()
        with loop.ddp.no_sync():
            loss.backward()
        loop.loss().backward()

    return loop.trained(step)


def no_sync_around_forward(loop):
    def step(_):
        with loop.ddp.no_sync():
            loss = loop.loss()
        loss.backward()
        loop.loss().backward()

    return loop.trained(step)


def no_sync_of_the_handle_around_backward(loop):
    def step(_):
        loss = loop.loss()
        with (loop.side.handle or loop.ddp).no_sync():
            loss.backward()

    return loop.trained(step)


def flag_set_after_forward(loop):
    """By turns off and on between forward and backward."""

    def step(number):
        loop.ddp.require_backward_grad_sync = number % 2 == 0
        loss = loop.loss()
        loop.ddp.require_backward_grad_sync = number % 2 == 1
        loss.backward()

    return loop.trained(step)


def armed_by_hand(loop):
    """As Accelerate's trigger_sync_in_backward() does, after forward passes of which none was to be reduced."""

    def step(_):
        with loop.ddp.no_sync():
            losses = [loop.loss() for _ in range(3)]
            for loss in losses[:2]:
                loss.backward()
        loop.ddp.require_backward_grad_sync = loop.ddp.require_forward_param_sync = True
        loop.ddp.reducer.prepare_for_backward([losses[2]] if loop.ddp.find_unused_parameters else [])
        losses[2].backward()

    return loop.trained(step)


def past_ddp(loop):
    """DDP does not see this forward pass, and reduces nothing."""
    return loop.trained(lambda _: loop.loss(loop.module).backward())


def fisher_pass(loop):
    """A pass past DDP whose squared gradients are kept, between ordinary steps."""
    squares = []

    def step(number):
        if number % 2:
            loop.loss(loop.module).backward()
            squares.append([p.grad.square() for p in loop.module.parameters()])
            loop.optimizer.zero_grad()
        loop.loss().backward()

    return loop.trained(step), squares


def saliency_on_one_rank(loop):
    """Rank 0 alone runs a pass past DDP."""

    def step(_):
        if loop.side.rank == 0:
            loop.module(loop.side.batch(0)).sum().backward()
            loop.optimizer.zero_grad()
        loop.loss().backward()

    return loop.trained(step)


def evaluation_in_between(loop):
    """A forward pass without gradients resets a flag of DDP's between forward and backward."""

    def step(_):
        loss = loop.loss()
        with torch.no_grad():
            loop.ddp(loop.side.batch(0))
        loss.backward()

    return loop.trained(step)


def forward_left_unused(loop):
    """An armed reducer stays armed: the next pass is reduced, though DDP has not seen its forward."""

    def step(_):
        loop.loss()
        loop.loss(loop.module).backward()

    return loop.trained(step)


def several_forwards(loop):
    """One backward pass of two forward passes, the second of which decides."""

    def step(number):
        with contextlib.ExitStack() as stack:
            if number % 2:
                stack.enter_context(loop.ddp.no_sync())
            loss = loop.loss()
        (loss + loop.loss()).backward()

    return loop.trained(step)


def lightning_manual(loop):
    """Lightning's manual optimization runs forward past DDP, and then arms the reducer."""

    def step(_):
        loss = loop.loss(loop.module)
        loop.ddp.require_forward_param_sync = True
        loop.ddp.reducer._rebuild_buckets()
        loop.ddp.reducer.prepare_for_backward([loss])
        loss.backward()

    return loop.trained(step)


PROGRAMS = {each.__name__: each for each in (
    no_sync_around_backward, no_sync_around_forward, no_sync_of_the_handle_around_backward, flag_set_after_forward,
    armed_by_hand, past_ddp, fisher_pass, saliency_on_one_rank, evaluation_in_between, forward_left_unused,
    several_forwards, lightning_manual,
)}  # fmt: skip


def program(side, name, variant):
    return PROGRAMS[name](Loop(side, VARIANTS[variant]))


@pytest.mark.parametrize(
    ("mode", "variant"),
    [
        pytest.param(mode, each, marks=() if mode == "overlap" or each in ("plain", "join") else pytest.mark.slow)
        for mode in ("overlap", "hook")
        for each in VARIANTS
        if (mode, each) != ("overlap", "join")  # which is refused
    ],
)
@on_ranks(2)
def test_ddp_decides_which_passes_are_reduced(rank, variant, mode):
    names = [name for name in PROGRAMS if name not in VARIANTS[variant].without]
    return [f"{name}: {found}" for name in names for found in differences(rank, program, mode, name, variant)[:1]]


@pytest.mark.parametrize("inside", ["forward", "backward"])
@on_ranks(2)
def test_a_bare_module_has_one_decision_for_both_passes(rank, inside, mode):
    attached = Attached(net(), mode)
    attached.step(torch.ones(2, 6))

    def differing():
        with attached.handle.no_sync() if inside == "forward" else contextlib.nullcontext():
            loss = attached.module(torch.ones(2, 6)).sum()
        with attached.handle.no_sync() if inside == "backward" else contextlib.nullcontext():
            loss.backward()

    found = not_refused(differing, "no_sync()", "both")
    attached.step(torch.ones(2, 6))  # nothing is left behind
    return found


def own_pass(attached, *, training):
    """A pass that only this rank runs."""
    attached.module.train(training)
    attached.module(torch.ones(2, 6)).sum().backward()
    attached.module.train()


@pytest.mark.parametrize(("when", "training"), [("before the step", False), ("before step()", True)])
@on_ranks(2)
def test_a_pass_of_one_rank_alone_raises_on_all_before_an_update(rank, when, training, mode):
    attached = Attached(net(), mode, policy="fifo")
    for _ in range(5):
        attached.step(torch.ones(2, 6))
    attached.handle.flush()
    before = [p.detach().clone() for p in attached.module.parameters()]

    def differing():
        if rank.index == 0 and when == "before the step":
            own_pass(attached, training=training)
        attached.optimizer.zero_grad()
        attached.module(torch.ones(2, 6)).sum().backward()
        if rank.index == 0 and when == "before step()":
            own_pass(attached, training=training)
        attached.optimizer.step()
        if when == "before step()":  # whose gradients are those of both ranks: no harm is done yet
            attached.handle.flush()
            before[:] = [p.detach().clone() for p in attached.module.parameters()]
            attached.module(torch.ones(2, 6)).sum().backward()
            attached.optimizer.step()
        attached.handle.flush()

    found = not_refused(differing, "backward pass number", "no_sync()")
    found += not_refused(lambda: attached.step(torch.ones(2, 6)), "backward pass number")
    found += not_refused(attached.handle.detach, "backward pass number")
    if rank.index == 1 or when == "before the step":
        found += compare.trees([p.detach() for p in attached.module.parameters()], before)
    return found


@on_ranks(2)
def test_a_pass_of_one_rank_alone_that_looks_like_a_step_is_found_in_the_next(rank, mode):
    """Rank 1's first update uses the sum: nothing tells this pass from that of an ordinary step."""
    attached = Attached(net(), mode)
    for _ in range(5):
        attached.step(torch.ones(2, 6))

    def differing():
        if rank.index == 0:
            own_pass(attached, training=True)
            attached.optimizer.zero_grad()
        for _ in range(2):
            attached.step(torch.ones(2, 6))
        attached.handle.flush()

    return not_refused(differing, "backward pass number")
