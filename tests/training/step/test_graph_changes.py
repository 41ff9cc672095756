"""Backward passes that do not reach every parameter, and sets of parameters that change: DDP's result, bit for bit.

DDP's side runs with find_unused_parameters, and is wrapped anew where its parameters change.
"""

import pytest

import gradcast
from training import compare, optimizers
from training.attached import error_of
from training.models import TASKS
from training.needs import torch
from training.pool import on_ranks
from training.sides import DDP, differences

nn = torch.nn
WARMUP_STEPS = 3


class Branches(nn.Module):
    """``use`` names the branches that a pass goes through; the trunk is always used."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(12, 12)
        self.left, self.right = nn.Linear(12, 12), nn.Linear(12, 12)
        self.head = nn.Linear(12, 10)

    def forward(self, x, use=("left", "right")):
        x = torch.tanh(self.trunk(x))
        for name in use:
            x = x + torch.tanh(getattr(self, name)(x))
        return self.head(x)


class Sides:
    """The same module twice: DDP's, which ``wrap`` wraps, and gradcast's."""

    def __init__(self, rank, mode, optimizer="adam plain", make=Branches):
        self.rank = rank
        self.modules = []
        for _ in range(2):
            torch.manual_seed(rank.index)
            self.modules.append(make())
        self.recipes = [optimizers.make(optimizer, module) for module in self.modules]
        self.wrap()
        self.handle = gradcast.attach(
            self.modules[1],
            self.recipes[1].optimizer if mode == "overlap" else None,
            options=gradcast.Options(adapt=False, warmup_steps=WARMUP_STEPS, policy="fifo"),
        )

    def wrap(self):
        self.ddp = nn.parallel.DistributedDataParallel(self.modules[0], find_unused_parameters=True)

    def each(self):
        """(module that runs forward, bare module, optimizer) of either side."""
        forwards = (self.ddp, self.modules[1])
        return [(f, m, r.optimizer) for f, m, r in zip(forwards, self.modules, self.recipes, strict=True)]

    def loss(self, forward, number, *arguments):
        inputs, targets = TASKS["plain"].batch(self.rank.index, number)
        return nn.functional.cross_entropy(forward(inputs, *arguments), targets)

    def step(self, number, *arguments, set_to_none=True):
        for forward, _, optimizer in self.each():
            optimizer.zero_grad(set_to_none=set_to_none)
            self.loss(forward, number, *arguments).backward()
            optimizer.step()

    def differences(self):
        self.handle.flush()
        found = compare.modules(self.modules[1], self.modules[0])
        found += compare.optimizers(self.recipes[1].optimizer, self.recipes[0].optimizer)
        found += compare.trees(*[{n: p.grad for n, p in m.named_parameters()} for m in reversed(self.modules)], "grad")
        return found


# What each rank uses, step by step: everything, on one rank only, on the other only, on none.
USES = [
    (("left", "right"), ("left", "right")),
    (("left", "right"), ("left",)),
    (("right",), ("left",)),
    (("left",), ("left",)),
    ((), ()),
    (("right", "left"), ()),
]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("optimizer", ["sgd foreach", "adamw fused"])
@pytest.mark.parametrize("mode", ["overlap", "hook"])
@on_ranks(2)
def test_parameters_that_a_step_does_not_use(rank, mode, optimizer, set_to_none):
    """The optimizers decay weights: a parameter that no rank has used must not be updated, with zeros neither."""
    sides = Sides(rank, mode, optimizer)
    found = []
    for number in range(4 * len(USES)):
        sides.step(number, USES[(number * 5 + number // 6) % len(USES)][rank.index], set_to_none=set_to_none)
        if number % 7 == 6:
            found += sides.differences()
    return found + sides.differences()


def unused_three(rank):
    """Zeros of two ranks of three, and of all; DDP's order of summation may differ, so within its rounding."""
    sides = Sides(rank, "overlap", "sgd foreach")
    for number in range(12):
        sides.step(number, ("left",) if rank.index == number % 3 else ("right",) if number % 4 == 0 else ())
    sides.handle.flush()
    return compare.largest(*sides.modules)


def test_unused_on_two_ranks_of_three(ranks):
    for largest in ranks.run(3, unused_three):
        assert largest < 1e-6


@pytest.mark.parametrize("mode", ["overlap", "hook"])
@on_ranks(2)
def test_parameters_that_are_frozen_for_a_while(rank, mode):
    sides = Sides(rank, mode)
    for number in range(12):
        if number in (5, 8):
            for module in sides.modules:
                module.left.requires_grad_(number == 8)
        sides.step(number)
    return sides.differences()


def thawed_later(rank, mode):
    def make():
        module = Branches()
        module.left.requires_grad_(False)
        return module

    sides = Sides(rank, mode, make=make)
    version = 0
    for number in range(12):
        if number == 5:
            version = sides.handle.plan_version
            for module in sides.modules:
                module.left.requires_grad_(True)
            sides.wrap()
        sides.step(number)
    planned = len(sides.handle.plan.blocks)
    return sides.differences(), version, planned, sides.handle.stats()["step"]


@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_parameters_that_are_thawed_later(ranks, mode):
    for found, version, planned, steps in ranks.run(2, thawed_later, mode):
        assert found == []
        assert version > WARMUP_STEPS - 1
        assert planned == 8, "fifo sends every tensor alone: all eight travel now"
        assert steps == 12


@pytest.mark.parametrize("mode", ["overlap", "hook"])
@on_ranks(2)
def test_parameters_that_are_added_later(rank, mode):
    sides = Sides(rank, mode)
    for number in range(12):
        if number == 5:
            for module, recipe in zip(sides.modules, sides.recipes, strict=True):
                torch.manual_seed(7)
                module.more = nn.Linear(12, 12)
                recipe.optimizer.add_param_group({"params": list(module.more.parameters()), "lr": 0.03})
            sides.wrap()
        sides.step(number, ("left", "more") if number >= 5 else ("left", "right"))
    return sides.differences()


def replaced_later(rank):
    """The module gets another head, which the optimizer does not know."""
    sides = Sides(rank, "overlap")
    for number in range(5):
        sides.step(number)
    sides.modules[1].head = nn.Linear(12, 10)
    return error_of(lambda: sides.step(5))


def test_a_parameter_without_optimizer_is_named(ranks):
    for code, message in ranks.run(2, replaced_later):
        assert code == "invalid_use"
        assert "head.weight" in message or "not in the module" in message


@pytest.mark.parametrize("mode", ["overlap", "hook"])
@on_ranks(2)
def test_use_in_an_earlier_micro_batch_counts(rank, mode):
    """Used in the first micro-batch, which stays here, but not in the last: DDP counts it as used."""
    sides = Sides(rank, mode)
    contexts = (sides.ddp.no_sync, sides.handle.no_sync)
    for number in range(10):
        for (forward, _, optimizer), no_sync in zip(sides.each(), contexts, strict=True):
            optimizer.zero_grad()
            with no_sync():
                sides.loss(forward, 2 * number, ("left",) if rank.index else ("left", "right")).backward()
            sides.loss(forward, 2 * number + 1, ()).backward()
            optimizer.step()
    return sides.differences()


@pytest.mark.parametrize("mode", ["overlap", "hook"])
@on_ranks(2)
def test_a_failure_in_backward_that_all_ranks_catch(rank, mode):
    """All ranks fail in the middle of backward, catch it and go on with the next batch."""
    from training.bomb import Bomb

    sides = Sides(rank, mode)
    found = []
    for number in range(10):
        if number in (1, 6):
            forward, module, optimizer = sides.each()[1]
            optimizer.zero_grad()
            hook = module.left.register_forward_hook(lambda *call: Bomb.apply(call[2]))
            with pytest.raises(RuntimeError, match="in backward"):
                sides.loss(forward, number).backward()
            hook.remove()
        else:
            sides.step(number)
    return found + sides.differences()


def swap_what_has_no_parameters(rank):
    """A metric on one rank, and a loss with this step's weights on all: nothing that gradcast sends has changed."""
    sides = Sides(rank, "overlap")
    for number in range(8):
        for module in sides.modules:
            module.criterion = nn.CrossEntropyLoss(weight=torch.ones(10))
            if rank.index == 0 and number == 5:
                module.metric = nn.Identity()
        sides.step(number)
    return sides.differences(), sides.handle.measuring


def test_a_part_without_parameters_may_be_replaced(ranks):
    for found, measuring in ranks.run(2, swap_what_has_no_parameters):
        assert found == []
        assert not measuring


def add_what_cannot_be_trained(rank):
    """On rank 0 the memory of the next session is not to be had; afterwards the module is an ordinary one."""
    from unittest import mock

    from gradcast.training import attachment

    sides = Sides(rank, "overlap")
    _, module, optimizer = sides.each()[1]
    for number in range(6):
        sides.step(number)
    module.more = nn.Linear(12, 12)
    optimizer.add_param_group({"params": list(module.more.parameters())})
    inputs, _ = TASKS["plain"].batch(rank.index, 6)
    with mock.patch.object(attachment, "Session", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        module(inputs)
    again = error_of(lambda: module(inputs))
    sides.handle.detach()
    sides.handle.detach()
    module(inputs).sum().backward()
    error = error_of(lambda: gradcast.attach(module, optimizer).detach())
    return again, error


def test_where_a_module_cannot_begin_again_it_is_said_and_given_back(ranks):
    for (code, message), error in ranks.run(2, add_what_cannot_be_trained):
        assert code == "invalid_use"
        assert "could not begin again with the module's new parameters (KeyboardInterrupt" in message
        assert error == (None, "no error")


def freeze_by_turns(rank, mode):
    """One branch is frozen already at attach. How often gradcast has begun again, turn by turn."""
    sides = Sides(rank, mode, make=HalfFrozen)
    sessions = []
    for number in range(20):
        turn = number // 5
        if number % 5 == 0:
            for module in sides.modules:
                module.left.requires_grad_(turn % 2 == 0)
                module.right.requires_grad_(turn % 2 == 1)
            sides.wrap()  # DDP cannot go on with other parameters
        sides.step(number)
        if number % 5 == 4:
            sessions.append(id(sides.handle._session))
    return sides.differences(), sessions


class HalfFrozen(Branches):
    def __init__(self):
        super().__init__()
        self.right.requires_grad_(False)


@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_parts_that_are_frozen_by_turns_are_measured_once(ranks, mode):
    for found, sessions in ranks.run(2, freeze_by_turns, mode):
        assert found == []
        assert sessions[0] != sessions[1], "the thawed branch is new"
        assert sessions[1] == sessions[2] == sessions[3]


class Other(nn.Module):
    """Trained by a method of its own, as frameworks have it."""

    def __init__(self):
        super().__init__()
        self.branches = Branches()

    def training_loss(self, inputs, targets, use):
        return nn.functional.cross_entropy(self.branches(inputs, use), targets)


@on_ranks(2)
def test_a_module_that_is_trained_by_another_method_than_forward(rank):
    """In a third of the steps one branch is not used, and its gradient of the step before comes late."""
    sides = Sides(rank, "overlap", make=Other)
    exchange = sides.handle._session.exchange
    arrived, late = exchange.newly_arrived, []
    names = [name for name, _ in sides.modules[1].named_parameters()]

    def without_the_late_ones():
        found = arrived()
        late.extend(index for index in found if ".right." in names[index])
        return [index for index in found if index not in late]

    for number in range(8):
        use = ("left",) if number % 3 == 1 else ("left", "right")
        for module, recipe in zip(sides.modules, sides.recipes, strict=True):
            recipe.optimizer.zero_grad()
            inputs, targets = TASKS["plain"].batch(rank.index, number)
            exchange.newly_arrived = without_the_late_ones if len(use) == 1 else arrived
            loss = module.training_loss(inputs, targets, use)
            exchange.newly_arrived = lambda: [*arrived(), *(late.pop() for _ in list(late))]
            loss.backward()
            if module is sides.modules[0]:  # DDP has no such method: its sum by hand
                for parameter in module.parameters():
                    if parameter.grad is not None:
                        torch.distributed.all_reduce(parameter.grad)
                        parameter.grad /= 2
            recipe.optimizer.step()
    return sides.differences()


class FirstOnly(torch.autograd.Function):
    """A sum whose backward has nothing for its second addend, as functions of one's own may."""

    @staticmethod
    def forward(ctx, first, second):
        return first + second

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class WithoutGradient(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.shift = nn.Linear(6, 2), nn.Parameter(torch.ones(2))

    def forward(self, x):
        return FirstOnly.apply(self.layer(x), self.shift)


def train_without_gradient(side):
    torch.manual_seed(0)
    module = WithoutGradient()
    ddp = DDP(module, find_unused_parameters=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    side.attach(ddp, optimizer)
    return side.trained(ddp, module, optimizer)


@pytest.mark.parametrize("mode", ["overlap", "hook"])
@on_ranks(2)
def test_a_function_that_returns_no_gradient_leaves_its_parameter_unused(rank, mode):
    return differences(rank, train_without_gradient, mode)
