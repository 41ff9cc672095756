"""Backward passes that do not reach every parameter, and sets of parameters that change: DDP's result, bit for bit.

DDP's side runs with find_unused_parameters, and is wrapped anew where its parameters change.
"""

import copy
from unittest import mock

import pytest

import gradcast
from gradcast.training import attachment
from training import compare
from training.attached import error_of, not_refused
from training.inside import session_of
from training.models import Branches
from training.needs import torch
from training.pair import DDP, Pair, Training, differences, net
from training.pool import on_ranks

nn = torch.nn


def branches(rank, mode="overlap", optimizer="adam plain", make=Branches):
    ddp_options = {"find_unused_parameters": True}
    return Pair(rank, make, optimizer, mode=mode, ddp_options=ddp_options, policy="fifo")


# What each rank uses, step by step: everything, on one rank only, on the other only, on none.
USES = [
    (("left", "right"), ("left", "right")),
    (("left", "right"), ("left",)),
    (("right",), ("left",)),
    (("left",), ("left",)),
    ((), ()),
    (("right", "left"), ()),
]


@pytest.mark.parametrize(("optimizer", "set_to_none"), [("sgd foreach", True), ("adamw fused", False)])
@on_ranks(2)
def test_parameters_that_a_step_does_not_use(rank, mode, optimizer, set_to_none):
    """The optimizers decay weights: a parameter that no rank has used must not be updated, with zeros neither."""
    pair = branches(rank, mode, optimizer)
    found = []
    for number in range(4 * len(USES)):
        pair.step(USES[(number * 5 + number // 6) % len(USES)][rank.index], set_to_none=set_to_none)
        if number % 7 == 6:
            found += pair.differences()
    return found + pair.differences()


class HalfFrozen(Branches):
    def __init__(self):
        super().__init__()
        self.right.requires_grad_(False)


@on_ranks(2)
def test_a_module_that_gets_another_head_is_refused(rank):
    pair = branches(rank)
    pair.train(5)
    pair.modules[1].head = nn.Linear(12, 10)
    return not_refused(pair.step, "not in the module")


@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_parameters_that_are_replaced_by_load_state_dict(ranks, mode):
    """In overlap mode the optimizer would go on with the old ones; in hook mode the new ones travel."""
    (refused, sums), (_, others) = ranks.run(2, assigned_state, mode)
    assert refused == ([] if mode == "overlap" else ["None: no error"])
    assert sums == others
    assert len(sums) == (0 if mode == "overlap" else 8)


def assigned_state(rank, mode):
    pair = branches(rank, mode)
    pair.train(1)
    module = pair.modules[1]
    module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)
    refused = not_refused(lambda: pair.ours.loss().backward(), "not in the module")
    return refused, [float(p.grad.sum()) for p in module.parameters() if p.grad is not None]


@on_ranks(2)
def test_a_part_without_parameters_may_be_replaced(rank):
    """A metric on one rank, and a loss with this step's weights on all: nothing that gradcast sends has changed."""
    pair = branches(rank)
    for number in range(8):
        for module in pair.modules:
            module.criterion = nn.CrossEntropyLoss(weight=torch.ones(10))
            if rank.index == 0 and number == 5:
                module.metric = nn.Identity()
        pair.step()
    assert not pair.handle.measuring
    return pair.differences()


@on_ranks(2)
def test_where_a_module_cannot_begin_again_it_is_said_and_given_back(rank):
    """On rank 0 the memory of the next session is not to be had; afterwards the module is an ordinary one."""
    pair = branches(rank)
    pair.train(6)
    module, optimizer = pair.ours.module, pair.ours.optimizer
    module.more = nn.Linear(12, 12)
    optimizer.add_param_group({"params": list(module.more.parameters())})
    inputs, _ = pair.ours.batch()
    with mock.patch.object(attachment, "Session", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        module(inputs)
    words = "could not begin again with the module's new parameters (KeyboardInterrupt"
    found = not_refused(lambda: module(inputs), words)
    pair.handle.detach()
    pair.handle.detach()
    module(inputs).sum().backward()
    assert error_of(lambda: gradcast.attach(module, optimizer).detach()) == (None, "no error")
    return found


@on_ranks(2)
def test_parts_that_are_frozen_by_turns_are_measured_once(rank, mode):
    """One branch is frozen already at attach. Only where the other one is thawed, gradcast begins again."""
    pair = branches(rank, mode, make=HalfFrozen)
    sessions = []
    for number in range(20):
        turn = number // 5
        if number % 5 == 0:
            for module in pair.modules:
                module.left.requires_grad_(turn % 2 == 0)
                module.right.requires_grad_(turn % 2 == 1)
            pair.theirs.wrap()  # DDP cannot go on with other parameters
        pair.step()
        if number % 5 == 4:
            sessions.append(id(session_of(pair.handle)))
    assert sessions[0] != sessions[1] == sessions[2] == sessions[3]
    return pair.differences()


def thaws_inside_ddp(side):
    module = net()
    module[2].requires_grad_(False)
    optimizer = torch.optim.Adam(module.parameters())
    called = DDP(module)
    side.attach(called, optimizer)
    for number in range(12):
        if number == 6:
            module[2].requires_grad_(True)
            if side.name == "ddp":
                called = DDP(module)
        optimizer.zero_grad()
        called(side.batch(number)).square().sum().backward()
        optimizer.step()
    return side.result(module, optimizer)


@on_ranks(2)
def test_what_thaws_inside_ddp_is_averaged(rank, mode):
    """As by a DDP module that is made then. One that was made before leaves it to each rank."""
    return differences(rank, thaws_inside_ddp, mode)


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
    pair = branches(rank, make=Other)
    exchange = session_of(pair.handle).exchange
    arrived, late = exchange.newly_arrived, []
    names = exchange.buffers.names

    def without_the_late_ones():
        found = arrived()
        late.extend(index for index in found if ".right." in names[index])
        return [index for index in found if index not in late]

    for number, side in pair.rounds(8):
        use = ("left",) if number % 3 == 1 else ("left", "right")
        side.optimizer.zero_grad()
        exchange.newly_arrived = without_the_late_ones if len(use) == 1 else arrived
        loss = side.module.training_loss(*side.batch(), use)
        exchange.newly_arrived = lambda: [*arrived(), *(late.pop() for _ in list(late))]
        loss.backward()
        if side is pair.theirs:  # DDP has no such method: its sum by hand
            for parameter in side.module.parameters():
                if parameter.grad is not None:
                    torch.distributed.all_reduce(parameter.grad)
                    parameter.grad /= 2
        side.optimizer.step()
    return pair.differences()


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
        self.layer, self.shift = nn.Linear(12, 10), nn.Parameter(torch.ones(10))

    def forward(self, x):
        return FirstOnly.apply(self.layer(x), self.shift)


@on_ranks(2)
def test_a_function_that_returns_no_gradient_leaves_its_parameter_unused(rank, mode):
    pair = branches(rank, mode, "sgd foreach", make=WithoutGradient)
    pair.train(8)
    return pair.differences()


class Codebook(nn.Module):
    """Puts a new tensor into the place of a buffer, as vector quantization does."""

    def __init__(self, rank):
        super().__init__()
        self.linear = nn.Linear(12, 10)
        self.rank = rank
        self.register_buffer("codes", torch.full((3,), float(rank)))

    def forward(self, x):
        self.codes = self.codes + 1.0 + self.rank
        return self.linear(x) + self.codes.sum() * 0.0


@on_ranks(2)
def test_buffers_that_a_module_replaces(rank):
    """Before each forward pass they are rank 0's: it counts by one, so after six passes it has 6, and rank 1 5 + 2."""
    ours = Training(rank.index, lambda: Codebook(rank.index), "sgd plain")
    ours.train(6)
    return compare.trees(ours.module.codes.tolist(), [6.0 + rank.index] * 3, "codes")
