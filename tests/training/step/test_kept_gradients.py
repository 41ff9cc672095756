"""Gradients that a program keeps stay what they were, as with DDP, and only who keeps pays."""

import pytest

from training.needs import torch
from training.pool import on_ranks
from training.sides import DDP, Side, differences, net

nn = torch.nn


class KeepsPrevious(torch.optim.Optimizer):
    """Moves along the difference to the last gradient, which it keeps as it is."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                previous = self.state[p].get("previous", p.grad)
                p.sub_(2 * p.grad - previous, alpha=group["lr"])
                self.state[p]["previous"] = p.grad


def as_a_graph(p):
    weight = torch.ones_like(p.grad, requires_grad=True)
    return p.grad * weight, weight


def weight_gradient(kept):
    product, weight = kept
    return torch.autograd.grad(product.sum(), weight)[0]


# How a program keeps p.grad, and what it sees of it later.
WAYS = {
    "the gradient": (lambda p: p.grad, lambda kept: kept),
    "detached": (lambda p: p.grad.detach(), lambda kept: kept),
    "a part": (lambda p: p.grad[:1], lambda kept: kept),
    "numpy": (lambda p: p.grad.numpy(), torch.from_numpy),
    "DLPack": (lambda p: torch.from_dlpack(p.grad), lambda kept: kept),
    "a graph": (as_a_graph, weight_gradient),
}


def keep(side, way):
    module = net()
    ddp, optimizer = DDP(module), torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    side.attach(ddp, optimizer)
    taken, seen = WAYS[way]
    kept = [[taken(p) for p in module.parameters()] for _ in side.steps(ddp, optimizer)]
    return [[seen(each).clone() for each in step] for step in kept], side.result(module)


def keep_after_step(side):
    """When updates are due and gradients still travel."""
    module = net()
    ddp, optimizer = DDP(module), torch.optim.SGD(module.parameters(), lr=0.1)
    side.attach(ddp, optimizer)
    kept = []
    for number in range(8):
        optimizer.zero_grad()
        ddp(side.batch(number)).square().sum().backward()
        optimizer.step()
        kept.append([p.grad for p in module.parameters()])
    return kept, side.result(module)


def previous(side):
    module = net()
    ddp, optimizer = DDP(module), KeepsPrevious(module.parameters(), lr=0.1)
    side.attach(ddp, optimizer)
    return side.trained(ddp, module, optimizer)


def zeroed_in_place(side):
    """With set_to_none=False the kept gradients are the next ones with DDP, too."""
    module = net()
    ddp, optimizer = DDP(module), torch.optim.SGD(module.parameters(), lr=0.1)
    side.attach(ddp, optimizer)
    kept = []
    for number in range(8):
        optimizer.zero_grad(set_to_none=False)
        ddp(side.batch(number)).square().sum().backward()
        kept.append([p.grad for p in module.parameters()])
        optimizer.step()
    found = [[each.clone() for each in step] for step in kept]
    del kept
    return found, side.result(module)


PROGRAMS = {name: lambda side, name=name: keep(side, name) for name in WAYS}
PROGRAMS |= {"after step()": keep_after_step, "an optimizer's state": previous, "zeroed in place": zeroed_in_place}


@pytest.mark.parametrize("name", PROGRAMS)
@on_ranks(2)
def test_what_is_kept_stays_what_it_was(rank, name, mode):
    return differences(rank, PROGRAMS[name], mode)


def addresses(rank, mode, program):
    """Where each gradient lies, step by step, while ``program`` looks at them between backward and step()."""
    module = net()
    side = Side(mode, rank.index)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    side.attach(module, optimizer)
    found = []
    held = None
    for _ in side.steps(module, optimizer):
        if program == "a loop variable":
            for p in module.parameters():
                held = p.grad
        elif program == "one kept":
            held = module[2].weight.grad
        found.append([p.grad.data_ptr() for p in module.parameters()])
    del held
    side.handle.detach()
    return found


@pytest.mark.parametrize(("program", "moving"), [("nothing kept", None), ("a loop variable", 5), ("one kept", 2)])
def test_only_what_is_kept_gets_memory_of_its_own(ranks, mode, program, moving):
    """A variable that is left over costs the one gradient that it refers to: new memory for it in each step."""
    for found in ranks.run(2, addresses, mode, program):
        usual = found[4:]  # a plan is followed, so the layout stays
        for number, places in enumerate(zip(*usual, strict=True)):
            assert (len(set(places)) > 1) == (number == moving), (number, places)
