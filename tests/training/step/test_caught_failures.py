"""A backward pass that fails and is caught: nothing of it is left where all ranks fail, and nobody trains on with the
sums of a part where some do."""

from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest

from training.attached import error_of
from training.bomb import Bomb
from training.needs import torch
from training.pool import on_ranks
from training.step.test_graph_changes import Sides

# Where each rank fails: gradients come from the head down, so that they have some of them, others than each other.
PLACES = ("trunk", "left")


def fail(sides, number, place, run=lambda backward: backward()):
    """On gradcast's side only: stock DDP raises in the next forward pass."""
    forward, module, optimizer = sides.each()[1]
    optimizer.zero_grad()
    hook = getattr(module, place).register_forward_hook(lambda *call: Bomb.apply(call[2]))
    with pytest.raises(RuntimeError, match="in backward"):
        run(sides.loss(forward, number).backward)
    hook.remove()


@pytest.mark.parametrize("mode", ["overlap", "hook"])
@on_ranks(2)
def test_what_all_ranks_skip_leaves_nothing_behind(rank, mode):
    sides = Sides(rank, mode)
    for number in range(10):
        if number in (1, 6):
            fail(sides, number, PLACES[rank.index])
        else:
            sides.step(number)
    return sides.differences()


def as_on_a_device(backward):
    """Its hooks run on a thread of autograd's, not on the one that has called backward."""
    with mock.patch.object(torch.nn.Parameter, "is_cpu", False, create=True), ThreadPoolExecutor(1) as threads:
        threads.submit(backward).result()


def step_after_a_failure(rank, run=lambda backward: backward()):
    """As a loop that logs the error and goes on: what has no gradient is not updated, on any rank."""
    sides = Sides(rank, "overlap")
    for number in range(6):
        sides.step(number)
    before = {name: p.detach().clone() for name, p in sides.modules[1].named_parameters()}
    fail(sides, 6, "left", run)
    sides.each()[1][2].step()
    sides.handle.flush()
    return {name: bool((p != before[name]).any()) for name, p in sides.modules[1].named_parameters()}


@pytest.mark.parametrize("where", [(), (as_on_a_device,)], ids=["host", "as on a device"])
def test_a_step_after_a_failure_waits_for_nothing_that_never_comes(ranks, where):
    for updated in ranks.run(2, step_after_a_failure, *where):
        assert updated["head.weight"]
        assert not updated["trunk.weight"]
        assert not updated["left.weight"]


def fail_alone(rank, mode):
    sides = Sides(rank, mode)
    _, module, optimizer = sides.each()[1]

    def train(number):
        optimizer.zero_grad()
        sides.loss(module, number).backward()
        optimizer.step()

    for number in range(7):
        train(number)
    if rank.index == 1:
        fail(sides, 7, "trunk")
    else:
        train(7)  # waits for what rank 1 brings with its next pass
    failure = error_of(lambda: [train(number) for number in (8, 9, 10)])
    if rank.index == 0:  # the other one would wait for it
        sides.handle.detach()
    return failure


@pytest.mark.parametrize("mode", ["overlap", pytest.param("hook", marks=pytest.mark.slow)])
def test_where_one_rank_fails_alone_the_others_do_not_train_on(ranks, mode):
    (code, message), other = ranks.run(2, fail_alone, mode, wait_s=8)
    assert code == "invalid_use"
    assert "in iteration 7 the backward pass of another rank failed" in message
    assert other[0] == "communication"


def test_the_sum_of_usage_flags_shows_a_failure_in_every_dtype():
    from gradcast.training.step.gradient_buffers import GradientBuffers, Usage

    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        buffers = GradientBuffers(["a", "b"], [torch.zeros(3, dtype=dtype), torch.zeros(5, dtype=dtype)], 2)
        buffers.flag_all_used()
        assert buffers.any_rank_failed().tolist() == [0.0]
        other = GradientBuffers(["a", "b"], [torch.zeros(3, dtype=dtype), torch.zeros(5, dtype=dtype)], 2)
        other.flag_all_used()
        other.flag_failed(0)
        for mine, theirs in zip(buffers.flats, other.flats, strict=True):
            mine += theirs
        assert buffers.any_rank_failed().tolist() == [1.0]
        assert buffers.usage([0, 1]) == [Usage.FAILED, Usage.USED]


def test_the_sum_of_usage_flags_distinguishes_frozen_from_unused_in_every_dtype():
    """However many ranks there are."""
    from gradcast.training.step.gradient_buffers import GradientBuffers, Usage

    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for world_size in (2, 8, 4096, 16384):
            buffers = GradientBuffers(["a", "b", "c"], [torch.zeros(2, dtype=dtype)] * 3, world_size)
            buffers.flag_all_used()
            for index in range(3):
                buffers.flag_unused(index, frozen=index == 0)
            for flat in buffers.flats:
                flat *= world_size  # every rank says the same
            assert buffers.usage([0, 1, 2]) == [Usage.FROZEN, Usage.UNUSED, Usage.UNUSED]
            one_used = GradientBuffers(["a", "b", "c"], [torch.zeros(2, dtype=dtype)] * 3, world_size)
            one_used.flag_all_used()
            one_used.flats[0] += buffers.flats[0]
            assert one_used.usage([0, 1, 2]) == [Usage.USED] * 3
