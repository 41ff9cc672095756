"""Buffers of a DDP module in overlap mode: DDP's values, without an operation on its communicator beside blocks."""

import itertools
from types import SimpleNamespace
from unittest import mock

import pytest

from gradcast import _core
from training.attached import Attached, heard, planning
from training.inside import session_of
from training.needs import torch
from training.pair import DDP, Side, differences
from training.plan.test_handover import soon
from training.pool import on_ranks
from training.step.test_late_device import late_device
from training.step.test_module_buffers import LOOPS, Loop

pytest.importorskip("training.needs")
from gradcast.training.sessions import handover

nn = torch.nn


class Wrapped(Side):
    """gradcast is attached to a DDP module."""

    def called(self, module, optimizer, process_group=None, ddp_options=None, **options):
        ddp = DDP(module, **(ddp_options or {}))
        self.attach(ddp, optimizer, **options)
        return ddp


def on_ddp(program):
    def wrapped(side):
        inner = Wrapped(side.name, side.rank)
        inner.handles = side.handles
        return program(inner)

    return wrapped


class WithNorms(nn.Sequential):
    def __init__(self):
        layers = [each for _ in range(6) for each in (nn.Linear(8, 8), nn.BatchNorm1d(8))]
        super().__init__(*layers, nn.Linear(8, 1))


@on_ranks(2)
def test_ddp_sends_nothing_beside_blocks(rank):
    """On a device that brings gradients late, they are in flight where DDP's forward sends buffers."""
    with late_device(50_000):
        attached = Attached(DDP(WithNorms()))
    exchange, calls, broadcasts = session_of(attached.handle).exchange, [], []
    pre_forward, broadcast = DDP._pre_forward, DDP._distributed_broadcast_coalesced

    def noting(seen, function):
        return lambda *arguments: seen.append(exchange.busy) or function(*arguments)

    with mock.patch.multiple(
        DDP,
        _pre_forward=noting(calls, pre_forward),
        _distributed_broadcast_coalesced=noting(broadcasts, broadcast),
    ):
        for number in range(6):
            attached.step(torch.ones(4, 8) * number)
        attached.handle.flush()
    assert not any(broadcasts), "DDP sends buffers while gradients are in flight"
    assert any(calls), "nothing was in flight"


def evaluations(side):
    """In which DDP sends buffers, too, once."""
    loop = Loop(side)
    for number in range(10):
        loop.called.eval()
        for again in range(number % 3):
            with torch.inference_mode() if number % 2 else torch.no_grad():
                loop.forward(number + 50 + again)
        loop.called.train()
        loop.step(number)
    return loop.result()


class Codes(nn.Linear):
    """Without batch norm, whose backward raises with DDP after a second forward pass."""

    def __init__(self, rank):
        torch.manual_seed(rank)
        super().__init__(6, 1)
        self.register_buffer("code", torch.ones(6) * rank)

    def forward(self, x):
        with torch.no_grad():
            self.code.mul_(0.5).add_(x.mean(0))
        return super().forward(x + self.code.clone())


def two_forwards(side):
    """Whose gradients add up: the second one has rank 0's values of that time."""
    module = Codes(side.rank)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    ddp = side.called(module, optimizer)
    for number in range(8):
        optimizer.zero_grad()
        (ddp(side.batch(number)) + ddp(side.batch(number + 50))).sum().backward()
        optimizer.step()
    return side.result(module, optimizer), module.code


def late_buffers(side):
    loop = Loop(side)
    for number in range(9):
        if number == 5:
            loop.module.register_buffer("late", torch.full((3,), 1.0 + side.rank))
        if number == 7:
            loop.module.part = nn.BatchNorm1d(3, affine=False)
            loop.module.part.running_mean.add_(side.rank)
        loop.step(number)
    return loop.result()


def in_a_hook_of_the_program(side):
    """The mean of all ranks, once before forward and once behind it; gradcast is attached in between."""
    loop = Loop(side)
    group = torch.distributed.new_group()

    def average(_, named):
        with torch.no_grad():
            for name in ("counted_double", "strided"):
                torch.distributed.all_reduce(named[name], group=group)
                named[name].div_(2)

    location = torch.nn.parallel.distributed._BufferCommHookLocation
    for number in range(8):
        if number in (4, 6):
            where = location.PRE_FORWARD if number == 4 else location.POST_FORWARD
            loop.called._register_buffer_comm_hook(None, average, where)
        loop.step(number)
    return loop.result()


def switched(side):
    loop = Loop(side)
    for number in range(12):
        loop.called.broadcast_buffers = number not in (2, 5, 6, 9)
        loop.step(number)
    return loop.result()


def changed_by_the_program(side):
    """On each rank to other values, from the warm-up on; DDP sends rank 0's."""
    loop = Loop(side)
    for number in range(10):
        loop.module.heavy.add_(side.rank)
        loop.step(number)
    return loop.result()


def handed_over(side):
    """DDP reduces, and sends its buffers, again and again."""
    with soon():
        loop, by_ddp = Loop(side, plan=planning(adapt=True)), []
        for number in range(32):
            loop.step(number)
            by_ddp += [side.handle.stats()["reduced_by_ddp"]] if side.handle else []
    assert not by_ddp or (True, False) in itertools.pairwise(by_ddp)
    return loop.result()


def detached(side):
    loop = Loop(side)
    for number in range(10):
        if number == 6 and side.handle:
            side.handle.detach()
        loop.step(number)
    return loop.result()


DDP_LOOPS = {name: program for name, program in LOOPS.items() if name != "checkpointing"} | {
    "evaluations": evaluations,
    "two forwards": two_forwards,
    "late buffers": late_buffers,
    "a hook of the program": in_a_hook_of_the_program,
    "switched": switched,
    "changed by the program": changed_by_the_program,
    "handed over": handed_over,
    "detached": detached,
}
# In hook mode DDP sends its own, with nothing in flight.
CASES = [("overlap", name) for name in DDP_LOOPS] + [("hook", "steps"), ("hook", "a hook of the program")]


@pytest.mark.parametrize(("mode", "name"), CASES)
@on_ranks(2)
def test_buffers_are_those_of_ddp(rank, mode, name):
    return differences(rank, on_ddp(DDP_LOOPS[name]), mode)


def test_buckets_that_ddp_gets_do_not_count_the_buffers():
    sizes = {0: [1 << 20, 4 << 20, 4 << 20, 2 << 20], 1: [64]}
    blocks = [_core.Block(buffer=buffer, ranges=[(0, each)]) for buffer in sizes for each in sizes[buffer]]
    baseline = SimpleNamespace(blocks=[blocks[0], blocks[-1], *blocks[1:-1]])
    assert handover._buckets(baseline) == (4 << 20, True)


@on_ranks(2)
def test_a_first_change_by_the_program_stays_for_one_pass(rank):
    """Rank 1's, after the warm-up. From the next pass on rank 0's values of forward's beginning are sent."""

    def program(side):
        loop = Loop(side)
        for number in range(10):
            if number >= 6:
                loop.module.heavy.add_(side.rank)
            loop.step(number)
        seen, _ = loop.result()
        return [each["heavy"] for each in seen[::2]]

    theirs = program(Side("ddp", rank.index))
    inner = Wrapped("overlap", rank.index)
    with heard() as lines:
        ours = program(inner)
    inner.handle.detach()
    said = [line for line in lines if "changes buffers" in line]
    assert len(said) == (rank.index == 0)
    return [number for number in range(10) if (ours[number] == theirs[number]) != (number != 6 or rank.index == 0)]
