"""Weights that are refused: on every rank, and before a wrong mean is used."""

import contextlib
import math
import threading
import time

import pytest

import gradcast
from training.attached import attach, error_of, heard, not_refused
from training.needs import torch
from training.pool import on_ranks
from training.step.test_weights import LR, Uneven, batch, layers, loss_of
from training.test_disabled import disabling

BAD = {
    "negative": (-3, ["the weight of rank 1", "-3"]),
    "nan": (math.nan, ["the weight of rank 1", "nan"]),
    "text": ("12", ["the weight of rank 1", "something else"]),
    "tensor": (torch.tensor(3), ["the weight of rank 1", ".item()"]),
    "too large": (2**53 + 2, ["the weight of rank 1", "2^53"]),
    "infinite": (-math.inf, ["the weight of rank 1"]),
    "left out": (None, ["rank 1", "outside of handle.weight()"]),
}


@pytest.mark.parametrize("step", [0, 8])
@pytest.mark.parametrize("bad", BAD)
@on_ranks(2)
def test_a_bad_weight_on_one_rank_raises_on_all(rank, mode, bad, step):
    weight, words = BAD[bad]
    uneven = Uneven(rank, mode, layers())
    with contextlib.suppress(ValueError), uneven.handle.weight(1):
        pass  # refused, but the ranks agree to weigh
    for number in range(step):
        uneven.step(lambda number=number: uneven.weigh(number, 2 + rank.index))

    def run():
        around = contextlib.nullcontext() if weight is None else uneven.handle.weight(weight)
        with around if rank.index else uneven.handle.weight(3):
            loss_of(uneven.module, batch(rank.index, step, 3)).backward()

    def all_of_it():
        uneven.step(run)
        uneven.handle.flush()

    found = not_refused(all_of_it, *words)
    # The parameters lack an update, so every later use says so, and so does leaving.
    found += not_refused(lambda: uneven.step(lambda: uneven.weigh(step + 1, 3)), *words)
    error_of(uneven.handle.detach)
    return found


@pytest.mark.parametrize("step", [0, 8])
@on_ranks(2)
def test_no_samples_at_all_raise(rank, mode, step):
    uneven = Uneven(rank, mode, layers())
    for number in range(step):
        uneven.step(lambda number=number: uneven.weigh(number, 2 + rank.index))

    def all_of_it():
        uneven.step(lambda: uneven.weigh(step, 0))
        uneven.handle.flush()

    return not_refused(all_of_it, "weights of all ranks are 0", "skip")


@on_ranks(2)
def test_weights_that_reach_no_backward_pass_are_refused(rank, mode):
    uneven = Uneven(rank, mode, layers())

    def without():
        with uneven.handle.weight(3):
            pass

    def unsynchronized():
        with uneven.handle.weight(3), uneven.handle.no_sync():
            loss_of(uneven.module, batch(0, 0, 3)).backward()

    found = not_refused(without, "no gradients were sent")
    return found + not_refused(unsynchronized, "no gradients were sent", "no_sync()")


@on_ranks(2)
def test_a_rank_that_does_not_come_to_the_first_weight_is_named(rank):
    uneven = Uneven(rank, "overlap", layers(), watch=gradcast.Watch(stall_warning_s=0.2))

    def comes_when_it_is_named():
        while not any("the first handle.weight() on every rank" in x and "rank 1 has not" in x for x in lines):
            time.sleep(0.02)
        rank.signal("named")

    with heard() as lines:
        if rank.index == 1:
            rank.wait_for("named")
        else:
            threading.Thread(target=comes_when_it_is_named, daemon=True).start()
        for number in range(5):
            uneven.step(lambda number=number: uneven.weigh(number, 3))
        uneven.handle.detach()


@on_ranks(2)
def test_ranks_that_weigh_differently(rank, mode):
    module = layers()
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    given = "samples" if rank.index else None
    found = not_refused(lambda: attach(module, optimizer, mode, weight=given), "options.weight")
    return found + not_refused(lambda: attach(module, optimizer, mode, weight="all"), "all", code="invalid_option")


@on_ranks(2)
@disabling
def test_stock_ddp_cannot_weigh(rank, mode):
    module = layers()
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    found = not_refused(lambda: attach(module, optimizer, mode, weight="samples"), "GRADCAST_DISABLE")
    return found + not_refused(lambda: attach(module, optimizer, mode).weight(3), "GRADCAST_DISABLE")
