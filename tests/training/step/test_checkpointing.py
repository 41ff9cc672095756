"""Activation checkpointing runs parts of forward again inside of backward, with DDP's result bit for bit."""

import pytest

from training.attached import attach, not_refused
from training.models import TASKS
from training.needs import torch
from training.pair import Pair
from training.pool import on_ranks

nn = torch.nn
checkpoint = torch.utils.checkpoint


class Checkpointed(nn.Module):
    """Forward of the middle, which is used so many times, runs again inside backward."""

    def __init__(self, reentrant, times=1):
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.middle = nn.Sequential(nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh())
        self.last = nn.Linear(12, 10)
        self.reentrant, self.times = reentrant, times

    def forward(self, x):
        x = self.first(x)
        for _ in range(self.times):
            x = checkpoint.checkpoint(self.middle, x, use_reentrant=self.reentrant)
        return self.last(x)


@pytest.mark.parametrize(("reentrant", "times"), [(True, 1), (False, 2)])
@on_ranks(2)
def test_activation_checkpointing(rank, reentrant, times, mode):
    pair = Pair(rank, lambda: Checkpointed(reentrant, times), mode=mode, policy="fifo")
    pair.train(8)
    return pair.differences()


@on_ranks(2)
def test_a_part_used_twice_under_reentrant_checkpointing_is_refused(rank, mode):
    """DDP refuses this, so there is no other side."""
    module = Checkpointed(reentrant=True, times=2)
    attach(module, torch.optim.SGD(module.parameters(), lr=0.1), mode)
    inputs, targets = TASKS["plain"].batch(rank.index, 0)
    loss = TASKS["plain"].loss(module, (inputs.requires_grad_(), targets))
    return not_refused(loss.backward, "middle.", "use_reentrant=False")
