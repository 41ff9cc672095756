"""Kinds of optimizers. Those that treat parameters one by one give the numbers of an undivided step, bit for bit."""

import pytest

from gradcast.training.step.partial_step import _carry_over
from training.models import TASKS
from training.needs import torch
from training.optimizers import KINDS, Recipe
from training.pool import on_ranks
from training.sides import differences
from training.twins import Twins

nn = torch.nn
TASK = TASKS["plain"]


@pytest.mark.parametrize("name", KINDS)
@on_ranks(2)
def test_parts_equal_the_whole(rank, name):
    twins = Twins(rank, "plain", lambda module: Recipe(KINDS[name](module.parameters())), policy="fifo")
    twins.train(5)
    for _ in range(3):
        twins.pending_step()
    twins.train(3)
    return twins.differences()


def test_what_was_changed_between_step_and_its_last_part_stays():
    """A scheduler sets a value in place, or puts another one there; the step itself counts in a tensor of its group."""
    live = {"lr": 5e-4, "rate": torch.tensor(0.5, requires_grad=True), "decay": torch.tensor(1.0), "params": []}
    before = {name: torch.tensor(value) for name, value in {"lr": 1e-3, "rate": 0.1, "decay": 1.0, "gone": 1.0}.items()}
    _carry_over(live, before, before | {"decay": torch.tensor(0.9), "count": 3})
    assert live == {"lr": 5e-4, "rate": torch.tensor(0.5), "decay": torch.tensor(0.9), "params": [], "count": 3}


def lbfgs(side):
    module = TASK.module()
    optimizer = torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=4)
    called = side.called(module, optimizer, policy="fifo")
    for number in range(4):

        def closure(number=number):
            optimizer.zero_grad()
            loss = TASK.loss(called, TASK.batch(side.rank, number))
            loss.backward()
            torch.distributed.all_reduce(loss.detach())  # the ranks have to agree on where to stop
            return loss

        optimizer.step(closure)
    if side.handle is not None:
        assert side.handle.plan.policy == "fifo", "more evaluations than the warm-up has"
    return side.result(module)


@on_ranks(2)
def test_lbfgs_in_hook_mode(rank):
    """Every evaluation of its closure is reduced."""
    return differences(rank, lbfgs, "hook")


def muon_and_adamw(side):
    module = TASK.module()
    matrices = [p for p in module.parameters() if p.ndim == 2]
    others = [p for p in module.parameters() if p.ndim != 2]
    both = [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)]
    called = side.called(module, both, policy="fifo")
    for number in range(9):
        for optimizer in both:
            optimizer.zero_grad()
        TASK.loss(called, TASK.batch(side.rank, number)).backward()
        for optimizer in both:
            optimizer.step()
    return side.result(module), [optimizer.state_dict() for optimizer in both]


@on_ranks(2)
def test_muon_with_adamw(rank, mode):
    """Matrices by Muon, the others by AdamW: two optimizers of one module, given to attach as a list."""
    return differences(rank, muon_and_adamw, mode)
