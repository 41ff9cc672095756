"""A backward pass that fails and is caught: nothing of it is left where all ranks fail, and nobody trains on with the
sums of a part where some do."""

from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest

from gradcast.training.step.gradient_buffers import GradientBuffers
from gradcast.training.step.step_message import StepMessage, message_tensor
from training import compare
from training.attached import not_refused
from training.bomb import Bomb
from training.needs import torch
from training.pool import on_ranks
from training.step.test_graph_changes import branches

# Where each rank fails: gradients come from the head down, so that they have some of them, others than each other.
PLACES = ("trunk", "left")
USED, NOBODY, FROZEN = (True, False), (False, False), (False, True)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def fail(pair, place, run=lambda backward: backward()):
    """On gradcast's side only: stock DDP raises in the next forward pass."""
    pair.ours.optimizer.zero_grad()
    hook = getattr(pair.ours.module, place).register_forward_hook(lambda *call: Bomb.apply(call[2]))
    with pytest.raises(RuntimeError, match="in backward"):
        run(pair.ours.loss().backward)
    hook.remove()


@on_ranks(2)
def test_what_all_ranks_skip_leaves_nothing_behind(rank, mode):
    pair = branches(rank, mode)
    for number in range(10):
        if number in (1, 6):
            fail(pair, PLACES[rank.index])
        else:
            pair.step()
    return pair.differences()


def as_on_a_device(backward):
    """Its hooks run on a thread of autograd's, not on the one that has called backward."""
    with mock.patch.object(torch.nn.Parameter, "is_cpu", False, create=True), ThreadPoolExecutor(1) as threads:
        threads.submit(backward).result()


@pytest.mark.parametrize("where", [(), (as_on_a_device,)], ids=["host", "as on a device"])
@on_ranks(2)
def test_a_step_after_a_failure_waits_for_nothing_that_never_comes(rank, where):
    """As a loop that logs the error and goes on: what has no gradient is not updated, on any rank."""
    pair = branches(rank)
    pair.train(6)
    before = {name: p.detach().clone() for name, p in pair.modules[1].named_parameters()}
    fail(pair, "left", *where)
    pair.ours.optimizer.step()
    pair.handle.flush()
    updated = {name: bool((p != before[name]).any()) for name, p in pair.modules[1].named_parameters()}
    expected = {"head.weight": True, "trunk.weight": False, "left.weight": False}
    return {name: each for name, each in updated.items() if expected.get(name, each) != each}


@pytest.mark.parametrize("mode", ["overlap", pytest.param("hook", marks=pytest.mark.slow)])
@on_ranks(2, wait_s=8)
def test_where_one_rank_fails_alone_the_others_do_not_train_on(rank, mode):
    pair = branches(rank, mode)
    module, optimizer = pair.ours.module, pair.ours.optimizer

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            pair.ours.loss().backward()
            optimizer.step()

    train(7)
    pair.handle.flush()
    if rank.index == 1:
        fail(pair, "trunk")
        return not_refused(lambda: train(3), code="communication")
    before = [parameter.detach().clone() for parameter in module.parameters()]
    # Waits for what rank 1 brings with its next pass.
    found = not_refused(lambda: train(3), "in iteration 7 the backward pass of another rank failed")
    found += not_refused(pair.handle.detach, "in iteration 7")  # all the same: the other one would wait for it
    return found + compare.trees([parameter.detach() for parameter in module.parameters()], before, "updated")


def messages(dtype, world_size=2):
    """Two that say of three parameters that they are used, and a function that adds the second to the first."""
    parameters = [torch.zeros(3, dtype=dtype)] * 3
    sent = [*parameters, message_tensor(parameters, with_norms=False)]
    buffers = [GradientBuffers(list("abcm"), sent, world_size) for _ in range(2)]
    found = [StepMessage(each, 3, world_size) for each in buffers]
    for message in found:
        message.begin_pass(None)

    def add(times=1):
        for message in found:
            message.write({})
        buffers[0].flats[0].mul_(times).add_(buffers[1].flats[0])

    return *found, add


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_of_usage_flags_shows_a_failure(dtype):
    message, other, add = messages(dtype)
    add()
    assert not message.receive(None).has_failed
    other.flag_failed(0)
    add()
    assert message.receive(None).has_failed
    assert not message.received.differs
    assert message.usage([0, 1, 2]) == [NOBODY, USED, USED]


@pytest.mark.parametrize("world_size", [2, 8, 4096, 16384])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_of_usage_flags_distinguishes_frozen_from_unused(dtype, world_size):
    unused, one_used, add = messages(dtype, world_size)
    for message in (unused, one_used):
        for index in range(3):
            message.flag_unused(index, frozen=index == 0)
    add(world_size - 1)
    assert unused.usage([0, 1, 2]) == [FROZEN, NOBODY, NOBODY]
    one_used.begin_pass(None)
    add(world_size - 1)
    assert unused.usage([0, 1, 2]) == [USED] * 3
