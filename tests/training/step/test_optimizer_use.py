"""Schedulers, closures, scalers and hands on the optimizer: a step uses the values that stood when it was called."""

import copy
import warnings

import pytest

from training import compare
from training.needs import torch
from training.optimizers import Recipe
from training.pool import on_ranks
from training.sides import DDP, differences, net
from training.twins import Twins


def tensor_rate(module):
    return Recipe(torch.optim.Adam(module.parameters(), lr=torch.tensor(3e-3), foreach=False))


def maximizing(module):
    return Recipe(torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9, maximize=True))


@pytest.mark.parametrize("optimizer", ["sgd foreach", "adam plain", "adamw fused", tensor_rate, maximizing])
@on_ranks(2)
def test_hyper_parameters_changed_after_step_are_for_the_next_step(rank, optimizer):
    """Also a learning rate that is a tensor, which is changed in place."""
    twins = Twins(rank, "plain", optimizer)
    for number in range(8):
        twins.pending_step()
        for _, each, _ in twins.each():
            for group in each.param_groups:
                group["lr"] *= 0.5 if number % 2 else 1.5
                group["weight_decay"] = 0.1 * number
    return twins.differences()


@pytest.mark.parametrize("name", ["one_cycle", "lambda"])
@pytest.mark.parametrize("when", ["before the first step", "later"])
@on_ranks(2)
def test_a_scheduler_made_after_attach(rank, when, name):
    """The one made before attach is in test_equality.py (AdamW)."""
    twins = Twins(rank, "plain", "adam plain")
    twins.train(0 if when == "before the first step" else 4)
    makers = {
        "one_cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=12),
        "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step),
    }
    schedulers = [makers[name](optimizer) for _, optimizer, _ in twins.each()]
    for _ in range(8):
        twins.pending_step()
        for scheduler in schedulers:
            scheduler.step()
    return twins.differences()


@on_ranks(2)
def test_schedulers_do_not_warn(rank):
    """torch warns when scheduler.step() seems to come before optimizer.step(); with gradcast it must see the latter."""
    twins = Twins(rank, "plain", "adamw plain")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        twins.train(4)
    return [str(warning.message) for warning in caught if "scheduler" in str(warning.message)]


@on_ranks(2)
def test_step_with_a_closure(rank):
    twins = Twins(rank, "plain", "sgd foreach")
    values = {module: [] for module in twins.modules}
    for _, module, optimizer, forward in twins.rounds(6):

        def closure(optimizer=optimizer, forward=forward):
            optimizer.zero_grad()
            loss = twins.task.loss(forward, twins.batch())
            loss.backward()
            return loss

        values[module].append(optimizer.step(closure).item())
    theirs, ours = values.values()
    return twins.differences() + compare.trees(ours, theirs, "returned loss")


class CallsItsBase(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


def hooks_of_the_base_class(side):
    """torch calls them in the base class's step, too, once that has been used."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    module = net()
    optimizer = CallsItsBase(module.parameters(), lr=0.01, momentum=0.9)
    called = side.called(module, optimizer, policy="p3", policy_parameters={"slice_elements": 50})
    calls = {"pre": 0, "post": 0}
    optimizer.register_step_pre_hook(lambda *_: calls.update(pre=calls["pre"] + 1))
    optimizer.register_step_post_hook(lambda *_: calls.update(post=calls["post"] + 1))
    return side.trained(called, module, optimizer), calls


@on_ranks(2)
def test_hooks_run_as_often_where_a_step_calls_that_of_its_base_class(rank):
    return differences(rank, hooks_of_the_base_class, "overlap")


@pytest.mark.parametrize("overflow_at", [None, 5])
@pytest.mark.parametrize(
    ("optimizer", "unscale"), [("sgd foreach", False), ("adam plain", True), ("adam fused", False)]
)
@on_ranks(2)
def test_a_gradient_scaler(rank, optimizer, unscale, overflow_at):
    twins = Twins(rank, "plain", optimizer)
    scalers = {module: torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3) for module in twins.modules}
    for number, module, each, forward in twins.rounds(8):
        scaler = scalers[module]
        each.zero_grad()
        loss = twins.task.loss(forward, twins.batch())
        scaler.scale(loss * (float("inf") if number == overflow_at else 1.0)).backward()
        if unscale:
            scaler.unscale_(each)
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        scaler.step(each)
        scaler.update()
    theirs, ours = (scaler.state_dict() for scaler in scalers.values())
    return twins.differences() + compare.trees(ours, theirs, "scaler")


@on_ranks(2)
def test_loading_a_checkpoint_in_the_middle_of_training(rank):
    """A checkpoint is loaded while a step is pending; what was pending is gone, as it would be without gradcast."""
    twins = Twins(rank, "plain", "adam plain")
    twins.train(3)
    saved = [copy.deepcopy((module.state_dict(), optimizer.state_dict())) for module, optimizer, _ in twins.each()]
    twins.train(2)
    twins.pending_step()
    for (weights, state), (module, optimizer, _) in zip(saved, twins.each(), strict=True):
        module.load_state_dict(weights)
        optimizer.load_state_dict(state)
    found = twins.differences()
    twins.train(3)
    return found + twins.differences()


def train_beside_integers(side):
    """As a quantized layer's zero points: a parameter that is not trained and cannot be."""
    module = net()
    module[-1].register_parameter("points", torch.nn.Parameter(torch.tensor([2, 3]), requires_grad=False))
    ddp = DDP(module)
    optimizer = torch.optim.SGD(
        [module[-1].points, *(p for p in module.parameters() if p.requires_grad)], lr=0.1, momentum=0.9
    )
    side.attach(ddp, optimizer)
    return side.trained(ddp, module, optimizer)


@on_ranks(2)
def test_a_frozen_parameter_of_integers(rank):
    return differences(rank, train_beside_integers, "overlap")
