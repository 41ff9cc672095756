"""Ranks that run out of inputs at different times: in hook mode as with DDP, in overlap mode refused."""

import pytest

import gradcast
from training.attached import error_of
from training.models import TASKS
from training.needs import torch
from training.sides import DDP, differences

nn = torch.nn
STEPS = 5


def train(called, sgd, rank, count):
    for inputs, targets in (TASKS["plain"].batch(rank, number) for number in range(count)):
        sgd.zero_grad()
        nn.functional.cross_entropy(called(inputs), targets).backward()
        sgd.step()


def uneven(side, counts):
    """Steps together, then as many per rank as ``counts`` says inside of join(), then together again; and once more."""
    module = TASKS["plain"].module()
    ddp = DDP(module)
    sgd = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    side.attach(ddp, sgd, policy="fifo")
    found = []
    for turn in (1, 2):
        train(ddp, sgd, side.rank, STEPS)
        with ddp.join():
            train(ddp, sgd, side.rank, counts[side.rank])
        train(ddp, sgd, side.rank, STEPS)
        found.append(side.result(module))
        if side.handle is not None:
            assert side.handle.stats()["step"] == 2 * turn * STEPS, "the steps inside of join() were DDP's own"
    return found


def run_uneven(rank, counts):
    return differences(rank, lambda side: uneven(side, counts), "hook")


@pytest.mark.parametrize("counts", [(1, 4), (4, 1), (0, 3), (3, 3)])
def test_hook_mode_does_what_ddp_does(ranks, counts):
    """After join() DDP's momentum differs between the ranks, and so does gradcast's, in the same way."""
    for found in ranks.run(2, run_uneven, counts):
        assert found == []


def overlap(rank, enable):
    module = TASKS["plain"].module()
    ddp = DDP(module)
    sgd = torch.optim.SGD(module.parameters(), lr=0.05)
    gradcast.attach(ddp, sgd, options=gradcast.Options(adapt=False, warmup_steps=3))

    def joined():
        with ddp.join(enable=enable):
            train(ddp, sgd, rank.index, 2)

    return error_of(joined)


def test_overlap_mode_refuses_it(ranks):
    for code, message in ranks.run(2, overlap, True):
        assert code == "invalid_use"
        assert "join()" in message
        assert "hook mode" in message


def test_a_join_that_is_switched_off_is_nothing(ranks):
    for code, message in ranks.run(2, overlap, False):
        assert code is None, message
