"""The host runs ahead of a device that brings gradients late, and training is the same: a device of the tests' own,
over the host's memory (late_device.cc). What a stream would wait for, the host waits for where it asks for that order.
"""

import collections
import contextlib
import os
import sys
import time
from unittest import mock

import pytest

import gradcast
from gradcast.training.compat import later_read
from gradcast.training.plan.expectation import Expectation
from gradcast.training.step import gradient_exchange
from training import _late_device
from training.attached import Attached, attach, planning
from training.inside import session_of
from training.needs import torch
from training.pool import on_ranks
from training.step.test_equality import CASES, train_both

nn = torch.nn
DELAY_US = 2000


@contextlib.contextmanager
def late_device(delay_us=DELAY_US, kind=_late_device.Transport):
    """Every module that is attached in here trains on it."""
    transports, attach, transport_of = [], gradcast.attach, gradient_exchange.transport_of

    def transport(*arguments):
        transports.append(kind(transport_of(*arguments), delay_us))
        return transports[-1]

    def attach_there(*arguments, **options):
        handle = attach(*arguments, **options)
        session_of(handle).exchange.on_device = True
        return handle

    there = mock.patch.object(gradient_exchange, "transport_of", transport)
    with there, mock.patch.object(gradcast, "attach", attach_there):
        yield transports


def train_late(rank, case):
    with late_device() as transports:
        found, _ = train_both(rank, case, 20)
    (transport,) = transports
    assert transport.waited_count > 0, "the host was never ahead of the device"
    return found


@pytest.mark.parametrize(
    "case",
    [
        *(CASES[number] for number in (0, 4, 10)),
        *(pytest.param(CASES[number], marks=pytest.mark.slow) for number in (1, 5, 7, 9)),
    ],
    ids=str,
)
def test_equal_to_the_same_reductions(ranks, case):
    assert not any(ranks.run(case.world_size, train_late, case, timeout_s=120))


@on_ranks(2)
def test_after_flush_nothing_travels(rank):
    """A device's memory may go then, and the process group."""
    with late_device(300_000):
        attached = Attached(nn.Linear(8, 8), "hook")
    attached.step(torch.ones(4, 8))
    attached.handle.flush()
    return session_of(attached.handle).report.is_sending


@on_ranks(2)
def test_a_step_begins_before_the_host_has_heard_of_the_ends_of_the_last_one(rank, mode):
    """The device keeps the order, so its queue must not run empty meanwhile. In the warm-up the ends are measured."""
    with late_device(100_000) as transports:
        attached = Attached(nn.Linear(8, 8), mode)
    exchange, travelling = session_of(attached.handle).exchange, []
    begin = exchange.begin
    exchange.begin = lambda: travelling.append(exchange.busy) or begin()
    for _ in range(6):
        attached.step(torch.ones(4, 8))
    attached.handle.flush()
    assert not exchange.busy
    assert travelling == [False] * 4 + [True] * 2
    assert transports[0].waited_count > 0


@on_ranks(2)
def test_all_blocks_of_a_step_are_queued_before_the_first_ends(rank, mode):
    """As DDP's buckets are. A host that waited for the device could not queue the kernels behind them in time."""
    layers = [nn.Linear(8, 8, bias=False) for _ in range(20)]
    plan = planning("ddp", first_bytes=1, cap_bytes=1)
    with late_device(40_000) as transports:
        attached = Attached(nn.Sequential(*layers), mode, plan=plan)
    for _ in range(5):
        attached.step(torch.ones(4, 8))
    attached.handle.flush()
    assert len(attached.handle.plan.blocks) == 20
    return transports[0].most_open - 20


class CountedOrders(_late_device.Transport):
    """Counts what a stream is ordered behind; the host goes on, as on a real device."""

    count = 0

    def order_behind(self, places):
        self.count += len(places)


@on_ranks(2)
def test_a_stream_is_ordered_once_behind_each_gradient_of_a_step(rank):
    """Parts that arrive in the order in which forward reads them: while the second is waited for, the first is still
    queued as far as the host knows."""
    layers = [nn.Linear(8, 8, bias=False) for _ in range(10)]
    plan = planning("ddp", first_bytes=1, cap_bytes=1)
    with late_device(40_000, CountedOrders) as transports:
        attached = Attached(nn.Sequential(*layers), plan=plan)
    (transport,) = transports
    for _ in range(4):
        attached.step(torch.ones(4, 8))
    attached.handle.flush()
    exchange = session_of(attached.handle).exchange
    forward_order = sorted(exchange.plan.blocks, key=lambda block: block.ranges[0])
    exchange.follow(exchange.profile, exchange.plan.replace(blocks=forward_order))
    before = transport.count
    attached.step(torch.ones(4, 8))
    attached.module(torch.ones(4, 8))
    gradients_and_message, buffers = len(layers) + 1, 1
    assert 0 < transport.count - before <= gradients_and_message + buffers
    attached.handle.flush()


@on_ranks(2)
def test_steps_as_ddp_only_order_streams(rank, mode):
    """The host goes on before it has heard of an end, as DDP's does."""
    never = property(lambda _: False)
    with late_device(60_000), mock.patch.object(Expectation, "is_worth_trying", never):
        attached = Attached(nn.Linear(8, 8), mode, plan=planning(adapt=True))
        travelling = []
        for _ in range(3 + 9 + 4):  # warm-up, the plan's first steps, and some
            attached.step(torch.ones(4, 8))
            travelling.append(session_of(attached.handle).exchange.busy)
        assert attached.handle.stats()["runs_as_ddp"]
        attached.handle.detach()
    return f"{travelling}" if not any(travelling[-3:]) else None


READS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "cpu", "numpy")


@contextlib.contextmanager
def counted_reads():
    """Counts, by function of gradcast, reads of values for which the host waits for a device; what is copied beside it
    does not count."""
    counts = collections.Counter()

    def counting(read):
        def counted(tensor, *arguments, **named):
            code = sys._getframe(1).f_code
            where = code.co_filename.split(os.sep)
            if "gradcast" in where and where[-1] != "later_read.py":
                counts[code.co_name] += 1
            return read(tensor, *arguments, **named)

        return counted

    def copy(values):
        return values.clone(), mock.Mock()

    with contextlib.ExitStack() as stack:
        for name in READS:
            stack.enter_context(mock.patch.object(torch.Tensor, name, counting(getattr(torch.Tensor, name))))
        stack.enter_context(mock.patch.multiple(later_read, _is_on_device=lambda _: True, _begin_copy=copy))
        yield counts


class Branch(nn.Module):
    """Uses its second layer on rank 0 only, and its third nowhere."""

    def __init__(self, rank):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.rank = rank

    def forward(self, x):
        x = self.layers[0](x)
        return self.layers[1](x) if self.rank == 0 else x


# By function, in five steps at most; nothing else may wait.
CLIPPING = {"certify": 5, "certified_share_if": 1, "any_asks_for_plan": 1}
WAITS = {
    "plain": ({}, {}),
    "values": ({"value": 0.1}, {}),
    "certified": ({"norm": 1e4}, CLIPPING),
    "clipped": ({"norm": 1e-3}, CLIPPING),
    "unused": ({}, {"usage": 5}),
}


@pytest.mark.parametrize("case", WAITS)
@on_ranks(2)
def test_the_host_waits_for_values_no_more_often_than_said(rank, case, mode):
    """docs/internals/cuda.md lists where."""
    clip, expected = WAITS[case]
    if mode == "hook" and clip:  # which clips nothing
        return None
    with late_device():
        module = Branch(rank.index) if case == "unused" else nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
        attached = Attached(module, mode, clip=gradcast.Clip(**clip))
    for _ in range(10):
        attached.step(torch.ones(4, 8))
    with counted_reads() as counts:
        for _ in range(5):
            attached.step(torch.ones(4, 8))
    attached.handle.flush()
    if case in ("certified", "unused"):
        assert counts, "reads are not seen"
    return counts - collections.Counter(expected)


@pytest.mark.parametrize("next_use", ["flush", "backward"])
@on_ranks(2)
def test_a_failure_that_comes_after_the_host_has_gone_on_is_raised(rank, next_use):
    with late_device(400_000) as transports:
        module = nn.Linear(8, 8, bias=False)
        handle = attach(module, None, "hook")
    module(torch.ones(4, 8)).sum().backward()
    handle.flush()
    transports[0].fail()
    module(torch.ones(4, 8)).sum().backward()  # the host goes on before that is known
    deadline_s = time.monotonic() + 20
    while session_of(handle).report.is_sending and time.monotonic() < deadline_s:
        time.sleep(0.01)  # whether that has been known for long makes no difference
    with pytest.raises(gradcast.Error, match="the cable is gone"):
        handle.flush() if next_use == "flush" else module(torch.ones(4, 8)).sum().backward()


@on_ranks(2)
def test_what_comes_in_one_block_is_updated_in_one_call(rank):
    with late_device():
        module = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
        attached = Attached(module, plan=planning("ddp", first_bytes=1 << 20))
    for _ in range(8):
        attached.step(torch.ones(4, 8))
    attached.handle.flush()
    assert (len(attached.handle.plan.blocks), attached.handle.stats()["update_calls"]) == (1, 1)
