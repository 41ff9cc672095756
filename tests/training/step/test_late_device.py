"""The host runs ahead of a device that brings gradients late, and training is the same: a device of the tests' own,
over the host's memory (late_device.cc). What a stream would wait for, the host waits for where it asks for that order.
"""

import contextlib
import time
from types import SimpleNamespace
from unittest import mock

import pytest

import gradcast
from gradcast.training.compat import extension
from gradcast.training.step import gradient_exchange
from training import _late_device
from training.attached import Attached, attach
from training.needs import torch
from training.pool import on_ranks
from training.step.test_equality import CASES, train_both

nn = torch.nn
DELAY_US = 2000


@contextlib.contextmanager
def late_device(delay_us=DELAY_US):
    """Every module that is attached in here trains on it."""
    transports, attach = [], gradcast.attach

    def transport(*arguments):
        transports.append(_late_device.Transport(extension.load().Transport(*arguments), delay_us))
        return transports[-1]

    def attach_there(*arguments, **options):
        handle = attach(*arguments, **options)
        handle._session.exchange._on_device = True
        return handle

    parts = SimpleNamespace(Transport=transport, AccumulationHooks=extension.load().AccumulationHooks)
    native = SimpleNamespace(load=lambda: parts)
    with mock.patch.object(gradient_exchange, "extension", native), mock.patch.object(gradcast, "attach", attach_there):
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
    return attached.handle._view().blocks_travelling


@on_ranks(2)
def test_a_step_begins_before_the_host_has_heard_of_the_ends_of_the_last_one(rank, mode):
    """The device keeps the order, so its queue must not run empty meanwhile. In the warm-up the ends are measured."""
    with late_device(100_000) as transports:
        attached = Attached(nn.Linear(8, 8), mode)
    exchange, travelling = attached.handle._session.exchange, []
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
    buckets = {"first_bytes": 1, "cap_bytes": 1}
    with late_device(40_000) as transports:
        attached = Attached(nn.Sequential(*layers), mode, policy="ddp", policy_parameters=buckets)
    for _ in range(5):
        attached.step(torch.ones(4, 8))
    attached.handle.flush()
    assert len(attached.handle.plan.blocks) == 20
    return transports[0].most_open - 20


@on_ranks(2)
def test_every_block_starts_behind_the_usage_flags(rank):
    """They are written all over the buffer where backward begins, and a gradient perhaps on another stream."""
    with late_device() as transports:
        attached = Attached(nn.Linear(8, 8), "hook")
    for _ in range(3):
        attached.step(torch.ones(4, 8))
    (flat,) = attached.handle._session.buffers.flats
    attached.handle.detach()
    return transports[0].written_count(0, 0, flat.nbytes) - 3


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
    while handle._view().blocks_travelling and time.monotonic() < deadline_s:
        time.sleep(0.01)  # whether that has been known for long makes no difference
    with pytest.raises(gradcast.Error, match="the cable is gone"):
        handle.flush() if next_use == "flush" else module(torch.ones(4, 8)).sum().backward()


@on_ranks(2)
def test_what_comes_in_one_block_is_updated_in_one_call(rank):
    with late_device():
        module = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
        attached = Attached(module, policy="ddp", policy_parameters={"first_bytes": 1 << 20})
    for _ in range(8):
        attached.step(torch.ones(4, 8))
    attached.handle.flush()
    assert (len(attached.handle.plan.blocks), attached.handle.stats()["update_calls"]) == (1, 1)
