"""Ranks that run out of inputs at different times: in hook mode as with DDP, in overlap mode refused."""

import pytest

import gradcast
from training import compare
from training.models import TASKS
from training.needs import torch

nn = torch.nn
STEPS = 5


def batches(rank, count):
    return [TASKS["plain"].batch(rank.index, number) for number in range(count)]


def uneven(rank, counts):
    """Steps together, then as many per rank as ``counts`` says inside of join(), then together again."""
    modules = [TASKS["plain"].module() for _ in range(2)]
    ddps = [nn.parallel.DistributedDataParallel(module) for module in modules]
    handle = gradcast.attach(ddps[1], options=gradcast.Options(adapt=False, warmup_steps=3, policy="fifo"))
    sgds = [torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9) for module in modules]

    def train(ddp, sgd, count):
        for inputs, targets in batches(rank, count):
            sgd.zero_grad()
            nn.functional.cross_entropy(ddp(inputs), targets).backward()
            sgd.step()

    found, versions = [], []
    for _ in range(2):
        for ddp, sgd in zip(ddps, sgds, strict=True):
            train(ddp, sgd, STEPS)
            with ddp.join():
                train(ddp, sgd, counts[rank.index])
            train(ddp, sgd, STEPS)
        found += compare.modules(modules[1], modules[0])
        versions.append(handle.stats()["step"])
    handle.detach()
    return found, versions


@pytest.mark.parametrize("counts", [(1, 4), (4, 1), (0, 3), (3, 3)])
def test_hook_mode_does_what_ddp_does(ranks, counts):
    """After join() DDP's momentum differs between the ranks, and so does gradcast's, in the same way."""
    for found, steps in ranks.run(2, uneven, counts):
        assert found == []
        assert steps == [2 * STEPS, 4 * STEPS], "the steps inside of join() were DDP's own"


def overlap(rank, enable):
    module = TASKS["plain"].module()
    ddp = nn.parallel.DistributedDataParallel(module)
    sgd = torch.optim.SGD(module.parameters(), lr=0.05)
    gradcast.attach(ddp, sgd, options=gradcast.Options(adapt=False, warmup_steps=3))
    try:
        with ddp.join(enable=enable):
            for inputs, targets in batches(rank, 2):
                sgd.zero_grad()
                nn.functional.cross_entropy(ddp(inputs), targets).backward()
                sgd.step()
    except gradcast.Error as error:
        return error.code, str(error)
    return None, "no error"


def test_overlap_mode_refuses_it(ranks):
    for code, message in ranks.run(2, overlap, True):
        assert code == "invalid_use"
        assert "join()" in message
        assert "hook mode" in message


def test_a_join_that_is_switched_off_is_nothing(ranks):
    for code, message in ranks.run(2, overlap, False):
        assert code is None, message
