"""Ranks that run out of inputs at different times: as with DDP."""

import pytest

from training.models import TASKS
from training.needs import torch
from training.pair import DDP, differences
from training.pool import on_ranks

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


@pytest.mark.parametrize("mode", ["hook", "overlap"])
@pytest.mark.parametrize("counts", [(1, 4), (4, 1), (0, 3), (3, 3)])
@on_ranks(2)
def test_it_does_what_ddp_does(rank, mode, counts):
    """After join() DDP's momentum differs between the ranks, and so does gradcast's, in the same way."""
    return differences(rank, uneven, mode, counts)


@on_ranks(2)
def test_nothing_changes_where_it_is_switched_off(rank):
    def program(side):
        module = TASKS["plain"].module()
        ddp = DDP(module)
        sgd = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        side.attach(ddp, sgd)
        with ddp.join(enable=False):
            train(ddp, sgd, rank.index, STEPS)
        assert side.handle is None or not side.handle.stats()["reduced_by_ddp"]
        return side.result(module)

    return differences(rank, program, "overlap")
