"""A step has the settings of its moment, however deep they lie, and optimizers that cannot be divided are found out."""

import types

import pytest

from training import compare
from training.attached import heard, not_refused
from training.needs import torch
from training.optimizers import Recipe
from training.pair import Pair, differences
from training.pool import on_ranks

nn = torch.nn


class Settings(torch.optim.SGD):
    """Reads settings of every kind, in its group and in attributes of its own."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1, momentum=0.9)
        for group in self.param_groups:
            group |= {"betas": [0.5, 0.9], "named": {"scale": 1.0, "deep": [{"decay": 0.1}]}}
        self.warmup, self.named = [0.1, 0.2], {"factor": torch.tensor(1.0)}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            factor = group["betas"][0] * group["named"]["scale"] * (1 - group["named"]["deep"][0]["decay"])
            factor *= (1 + sum(self.warmup)) * self.named["factor"].item()
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(factor)
        return super().step(closure)


def change_deep(optimizer, number):
    for group in optimizer.param_groups:
        group["betas"][0] = 0.1 * number
        group["named"]["scale"] += 0.5
        group["named"]["deep"][0]["decay"] = 0.05 * number
    optimizer.warmup.append(0.01)
    optimizer.named["factor"].mul_(1.1)


@on_ranks(2)
def test_settings_changed_in_place_after_step_are_for_the_next_one(rank):
    pair = Pair(rank, "plain", lambda module: Recipe(Settings(module.parameters())), policy="fifo")
    for number in range(9):
        pair.pending_step()
        for side in pair.sides:
            change_deep(side.optimizer, number)
    found = pair.differences()
    optimizers = [side.optimizer for side in pair.sides]
    settings = [[each.param_groups[0]["named"], each.warmup, each.named] for each in optimizers]
    return found + compare.trees(settings[1], settings[0], "what the program sees")


class FillsBuffer(torch.optim.SGD):
    """Keeps numbers of its own in a list of its group, as a well-known RAdam does."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        for group in self.param_groups:
            group |= {"buffer": [None] * 4, "count": 0}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            group["buffer"][group["count"] % 4] = 1 / group["count"]
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(group["buffer"][group["count"] % 4])
        return super().step(closure)


@on_ranks(2)
def test_a_list_that_the_step_fills_stays_the_programs_own(rank):
    pair = Pair(rank, "plain", lambda module: Recipe(FillsBuffer(module.parameters())), policy="fifo")
    buffers = [side.optimizer.param_groups[0]["buffer"] for side in pair.sides]
    for _ in range(9):
        pair.pending_step()
    return pair.differences() + compare.trees(buffers[1], buffers[0], "buffer")


class Scheduled(torch.optim.SGD):
    """Asks an object, which the program advances."""

    def __init__(self, parameters, where):
        super().__init__(parameters, lr=0.1)
        self.schedule = types.SimpleNamespace(value=1.0)
        self.where = where
        if where == "group":
            self.param_groups[0]["schedule"] = self.schedule
        elif where == "closure":
            schedule = self.schedule
            self.factor = lambda: schedule.value

    @torch.no_grad()
    def step(self, closure=None):
        if self.where == "group":
            factor = self.param_groups[0]["schedule"].value
        else:
            factor = self.factor() if self.where == "closure" else self.schedule.value
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1 * factor)


@pytest.mark.parametrize("where", ["group", "attribute", "closure"])
@on_ranks(2)
def test_an_optimizer_that_asks_an_object_updates_inside_step(rank, where):
    with heard() as lines:
        pair = Pair(rank, "plain", lambda m: Recipe(Scheduled(m.parameters(), where)), policy="fifo")
        for number in range(9):
            pair.step()
            for side in pair.sides:
                side.optimizer.schedule.value = 1 + 0.1 * number
    said = [line for line in lines if "step() of Scheduled reads its" in line]
    return pair.differences() + compare.trees(len(said), 1 if rank.index == 0 else 0, "said")


class Votes(torch.optim.SGD):
    """Asks the other ranks about each parameter, as sign votes do."""

    ended = 0

    def __init__(self, parameters, after=0):
        super().__init__(parameters, lr=0.1)
        self.after, self.count = after, 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for p in self.param_groups[0]["params"]:
            if self.count > self.after and p.grad is not None:
                torch.distributed.all_reduce(p.grad)
                Votes.ended += 1
        return super().step(closure)


@on_ranks(2, timeout_s=20.0)
def test_a_collective_in_step_is_refused_before_it_starts(rank):
    Votes.ended = 0
    words = "Votes", "all", "hook mode"
    found = not_refused(lambda: Pair(rank, "plain", lambda m: Recipe(Votes(m.parameters()))), *words)
    return found + compare.trees(Votes.ended, 0, "collectives")


@on_ranks(2, timeout_s=20.0)
def test_a_collective_in_a_later_step_is_an_error(rank):
    """With one block, so that parts are the same on both ranks, and nothing hangs."""

    def trained():
        pair = Pair(rank, "plain", lambda m: Recipe(Votes(m.parameters(), after=20)), policy="ddp")
        for _ in range(30):
            pair.ours.step()
        pair.handle.flush()

    return not_refused(trained, "collective", "Votes")


class LaterOn(torch.optim.SGD):
    """From its 20th step on, or when the gradients are large, it looks at all of them, or draws random numbers."""

    def __init__(self, parameters, kind):
        super().__init__(parameters, lr=1e-4)
        self.kind, self.count = kind, 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        given = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if self.kind == "outlier" and torch.stack([p.grad.norm() for p in given]).norm() > 1e8:
            nn.utils.clip_grad_norm_(given, 1e4)
        if self.kind == "noise" and self.count > 25:
            for p in given:
                p.grad.add_(torch.randn_like(p))
        return super().step(closure)


@pytest.mark.parametrize("kind", ["outlier", "noise"])
@on_ranks(2)
def test_an_optimizer_that_cannot_be_divided_any_more_is_an_error(rank, kind):
    def trained():
        torch.manual_seed(0)
        pair = Pair(rank, "plain", lambda m: Recipe(LaterOn(m.parameters(), kind)), policy="fifo")
        for number in range(60):
            pair.ours.optimizer.zero_grad()
            (pair.ours.loss() * (1e12 if kind == "outlier" and number == 40 else 1)).backward()
            pair.ours.optimizer.step()
            pair.ours.after_step()
        pair.handle.flush()

    return not_refused(trained, "LaterOn", "in parts", "hook mode")


class ByParameter(torch.optim.SGD):
    """Has a factor and a momentum for each parameter, as its attributes or by its identity."""

    def __init__(self, parameters, kind):
        super().__init__(parameters, lr=0.1)
        self.by_id = {id(p): {} for group in self.param_groups for p in group["params"]} if kind == "identity" else {}
        for p in (p for group in self.param_groups for p in group["params"]):
            self.of(p).update(factor=0.25, momentum=torch.zeros_like(p), steps=0)

    def of(self, parameter):
        return self.by_id.get(id(parameter), {}) if self.by_id else vars(parameter)

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            of = self.of(p)
            of["steps"] = of.get("steps", 0) + 1
            momentum = of.setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
            p.sub_(momentum, alpha=0.1 * of.get("factor", 1.0) / of["steps"])


@pytest.mark.parametrize("kind", ["attributes", "identity"])
@on_ranks(2)
def test_what_an_optimizer_keeps_by_parameter_stays_where_parts_are_compared(rank, kind):
    with heard() as lines:
        pair = Pair(rank, "plain", lambda m: Recipe(ByParameter(m.parameters(), kind)), policy="fifo")
        pair.train(30)  # the 20th step is compared
    return pair.differences() + [line for line in lines if "not compared" in line]


class Lookahead:
    """Shares the state of the optimizer that it goes around, and reads entries that exist after its step."""

    def __init__(self, base):
        self.base, self.state = base, base.state

    def step(self):
        self.base.step()
        for group in self.base.param_groups:
            for p in (each for each in group["params"] if each.grad is not None):
                slow = self.state[p].setdefault("slow", p.detach().clone())
                with torch.no_grad():
                    slow.add_(p - slow, alpha=0.5)


class UsesMoreLater(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.later, self.turn = nn.Linear(6, 4), nn.Linear(4, 4), 0

    def forward(self, x):
        self.turn += 1
        return self.first(x) if self.turn < 7 else self.later(self.first(x))


def shares_the_state(side):
    """Entries of some parameters are made when others have a plan."""
    module = UsesMoreLater()
    adam = torch.optim.Adam(module.parameters(), lr=1e-2)
    around = Lookahead(adam)
    called = side.called(module, adam, ddp_options={"find_unused_parameters": True}, policy="fifo")
    for number in range(10):
        adam.zero_grad()
        called(side.batch(number)).square().sum().backward()
        around.step()
    return side.result(module, adam), {name: around.state.get(p) for name, p in module.named_parameters()}


@on_ranks(2)
def test_whoever_shares_the_state_finds_what_step_has_made(rank):
    """Also in the dict that it has held since before attach."""
    return differences(rank, shares_the_state, "overlap")
