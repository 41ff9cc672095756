"""Activation checkpointing runs parts of forward again inside of backward, with DDP's result bit for bit."""

import pytest

import gradcast
from training.attached import error_of
from training.models import TASKS
from training.needs import torch
from training.pair import Pair

nn = torch.nn
checkpoint = pytest.importorskip("torch.utils.checkpoint")


class Checkpointed(nn.Module):
    """Forward of the middle runs again inside backward."""

    def __init__(self, reentrant):
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.middle = nn.Sequential(nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh())
        self.last = nn.Linear(12, 10)
        self.reentrant = reentrant

    def forward(self, x):
        x = checkpoint.checkpoint(self.middle, self.first(x), use_reentrant=self.reentrant)
        return self.last(x)


def recompute(rank, reentrant, mode):
    pair = Pair(rank, lambda: Checkpointed(reentrant), mode)
    pair.train(8)
    return pair.differences()


@pytest.mark.parametrize("mode", ["overlap", "hook"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(ranks, reentrant, mode):
    for found in ranks.run(2, recompute, reentrant, mode):
        assert found == []


class Twice(nn.Module):
    """A checkpointed part that is used twice."""

    def __init__(self, reentrant):
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.middle = nn.Sequential(nn.Tanh(), nn.Linear(12, 12))
        self.last = nn.Linear(12, 10)
        self.reentrant = reentrant

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint.checkpoint(self.middle, x, use_reentrant=self.reentrant)
        return self.last(x)


def recompute_twice(rank, reentrant, mode):
    pair = Pair(rank, lambda: Twice(reentrant), mode)
    pair.train(8)
    return pair.differences()


@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_a_checkpointed_part_that_is_used_twice(ranks, mode):
    for found in ranks.run(2, recompute_twice, False, mode):
        assert found == []


def recompute_twice_reentrant(rank, mode):
    """DDP refuses this, so there is no other side."""
    torch.manual_seed(0)
    module = Twice(True)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    gradcast.attach(module, sgd if mode == "overlap" else None, options=gradcast.Options(adapt=False, warmup_steps=3))
    inputs, targets = TASKS["plain"].batch(rank.index, 0)
    return error_of(nn.functional.cross_entropy(module(inputs.requires_grad_()), targets).backward)


@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_a_part_used_twice_under_reentrant_checkpointing_is_refused(ranks, mode):
    for code, message in ranks.run(2, recompute_twice_reentrant, mode):
        assert code == "invalid_use"
        assert "middle.1" in message
        assert "use_reentrant=False" in message
