"""Kinds of optimizers. Those that treat parameters one by one give the numbers of an undivided step, bit for bit."""

import pytest

from gradcast.training.step.partial_step import PartialStep, _carry_over
from training.models import TASKS
from training.needs import torch
from training.optimizers import KINDS, BoundToItself, Recipe
from training.pair import Pair, differences
from training.pool import on_ranks

nn = torch.nn
TASK = TASKS["plain"]


@pytest.mark.parametrize("name", KINDS)
@on_ranks(2)
def test_parts_equal_the_whole(rank, name):
    pair = Pair(rank, "plain", lambda module: Recipe(KINDS[name](module.parameters())), policy="fifo")
    pair.train(5)
    for _ in range(3):
        pair.pending_step()
    pair.train(3)
    return pair.differences()


def test_what_was_changed_between_step_and_its_last_part_stays():
    """A scheduler sets a value in place, or puts another one there; the step itself counts in a tensor of its group."""
    live = {"lr": 5e-4, "rate": torch.tensor(0.5, requires_grad=True), "decay": torch.tensor(1.0), "params": []}
    before = {name: torch.tensor(value) for name, value in {"lr": 1e-3, "rate": 0.1, "decay": 1.0, "gone": 1.0}.items()}
    _carry_over(live, before, before | {"decay": torch.tensor(0.9), "count": 3})
    assert live == {"lr": 5e-4, "rate": torch.tensor(0.5), "decay": torch.tensor(0.9), "params": [], "count": 3}


class GroupsInside(torch.optim.SGD):
    """Has the groups of an optimizer inside."""

    def __init__(self, inside):
        super().__init__([torch.zeros(1)], lr=0.1)
        self.inside = inside
        del self.__dict__["param_groups"]

    param_groups = property(
        lambda self: self.inside.param_groups if "inside" in vars(self) else vars(self)["param_groups"],
        lambda self, groups: (
            setattr(self.inside, "param_groups", groups)
            if "inside" in vars(self)
            else vars(self).update(param_groups=groups)
        ),
    )


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("kind", ["replaces_groups", "groups inside"])
def test_groups_are_whole_after_a_part(kind, elsewhere):
    parameters = [torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)]
    inside = KINDS["replaces_groups"](parameters)
    optimizer = GroupsInside(inside) if kind == "groups inside" else inside
    groups, partial = inside.param_groups, PartialStep(optimizer)
    for part in parameters:
        part.grad = torch.ones_like(part)
        partial.run([part], last=part is parameters[-1], elsewhere=elsewhere)
        assert inside.param_groups is groups
    assert [len(group["params"]) for group in groups] == [2]
    assert [each.sum().item() for each in parameters] == pytest.approx([1.8, 2.7])


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_an_optimizer_keeps_of_itself_updates_the_part_only(elsewhere):
    """A bound method; a closure over it only on the thread that trains."""
    parameters = [torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)]
    optimizer = BoundToItself(parameters)
    if elsewhere:
        optimizer.update = lambda: None
    partial = PartialStep(optimizer)
    for part in parameters:
        part.grad = torch.ones_like(part)
    for part in parameters:
        partial.run([part], last=part is parameters[-1], elsewhere=elsewhere)
    once = 0.99 if elsewhere else 0.89
    assert [each.tolist() for each in parameters] == [pytest.approx([once] * 2), pytest.approx([once] * 3)]


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
