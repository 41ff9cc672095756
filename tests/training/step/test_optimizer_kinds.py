"""Kinds of optimizers. Those that treat parameters one by one give the numbers of an undivided step, bit for bit."""

import pytest

import gradcast
from training import compare, optimizers
from training.models import TASKS
from training.needs import torch
from training.pool import on_ranks
from training.twins import Twins

nn = torch.nn

KINDS = {
    "sgd_nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
    "adam_amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, amsgrad=True, maximize=True),
    "adamw_capturable_rate": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(1e-2), foreach=False),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-2),
    "radam": lambda parameters: torch.optim.RAdam(parameters, lr=1e-2),
    "adamax": lambda parameters: torch.optim.Adamax(parameters, lr=1e-2),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2, lr_decay=0.1),
    "adagrad_fused": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2, fused=True),
    "adadelta": lambda parameters: torch.optim.Adadelta(parameters),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.9, centered=True),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, lr=1e-3),
    "asgd": lambda parameters: torch.optim.ASGD(parameters, lr=1e-2, t0=3),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    "counts_in_its_group": lambda parameters: CountsInGroup(parameters),
    "own_step": lambda parameters: OwnStep(parameters),
}


class CountsInGroup(torch.optim.Optimizer):
    """Keeps its count of steps in the group, where a step in parts must not count more than once."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "count": 0, "decay": torch.tensor(1.0)})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            group["decay"].mul_(0.9)
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"] / group["count"] * float(group["decay"]))


class OwnStep(torch.optim.SGD):
    """Does something of its own before and after the step that it inherits."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1, momentum=0.5)

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.sign_()
        return super().step(closure)


def train(rank, name):
    twins = Twins(rank, "plain", lambda module: optimizers.Recipe(KINDS[name](module.parameters())), policy="fifo")
    twins.train(5)
    for _ in range(3):
        twins.pending_step()
    twins.train(3)
    return twins.differences()


@pytest.mark.parametrize("name", KINDS)
def test_parts_equal_the_whole(ranks, name):
    for found in ranks.run(2, train, name):
        assert found == []


def test_what_was_changed_between_step_and_its_last_part_stays():
    """A scheduler sets a value in place, or puts another one there; the step itself counts in a tensor of its group."""
    from gradcast.training.step.partial_step import _carry_over

    live = {"lr": 5e-4, "rate": torch.tensor(0.5, requires_grad=True), "decay": torch.tensor(1.0), "params": []}
    before = {
        "lr": torch.tensor(1e-3),
        "rate": torch.tensor(0.1),
        "decay": torch.tensor(1.0),
        "gone": torch.tensor(1.0),
    }
    _carry_over(live, before, before | {"decay": torch.tensor(0.9), "count": 3})
    assert live == {"lr": 5e-4, "rate": torch.tensor(0.5), "decay": torch.tensor(0.9), "params": [], "count": 3}


def lbfgs(rank):
    """In hook mode, where every evaluation of its closure is reduced."""
    sides = []
    for _ in range(2):
        torch.manual_seed(0)
        sides.append(TASKS["plain"].make())
    forwards = (nn.parallel.DistributedDataParallel(sides[0]), sides[1])
    optimizers_ = [torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=4) for module in sides]
    handle = gradcast.attach(sides[1], options=gradcast.Options(adapt=False, warmup_steps=3, policy="fifo"))
    for number in range(4):
        inputs, targets = TASKS["plain"].batch(rank.index, number)
        for forward, optimizer in zip(forwards, optimizers_, strict=True):

            def closure(forward=forward, optimizer=optimizer, inputs=inputs, targets=targets):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(forward(inputs), targets)
                loss.backward()
                torch.distributed.all_reduce(loss.detach())  # the ranks have to agree on where to stop
                return loss

            optimizer.step(closure)
    plan = handle.plan.policy
    handle.detach()
    return compare.modules(sides[1], sides[0]), plan


def test_lbfgs_in_hook_mode(ranks):
    for found, plan in ranks.run(2, lbfgs):
        assert found == []
        assert plan == "fifo", "more evaluations than the warm-up has"


@pytest.mark.parametrize("mode", ["overlap", "hook"])
@on_ranks(2)
def test_muon_with_adamw(rank, mode):
    """Matrices by Muon, the others by AdamW: two optimizers of one module, by turns after each backward."""
    task = TASKS["plain"]
    sides = []
    for _ in range(2):
        module = task.module(seed=0)
        matrices = [p for p in module.parameters() if p.ndim == 2]
        others = [p for p in module.parameters() if p.ndim != 2]
        sides.append((module, [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)]))
    ddp = nn.parallel.DistributedDataParallel(sides[0][0])
    options = gradcast.Options(adapt=False, warmup_steps=3, policy="fifo")
    handle = gradcast.attach(sides[1][0], sides[1][1] if mode == "overlap" else None, options=options)
    for number in range(9):
        inputs, targets = task.batch(rank.index, number)
        for forward, (_, both) in zip((ddp, sides[1][0]), sides, strict=True):
            for optimizer in both:
                optimizer.zero_grad()
            nn.functional.cross_entropy(forward(inputs), targets).backward()
            for optimizer in both:
                optimizer.step()
    handle.flush()
    found = compare.modules(sides[1][0], sides[0][0])
    for ours, theirs in zip(sides[1][1], sides[0][1], strict=True):
        found += compare.optimizers(ours, theirs)
    return found
