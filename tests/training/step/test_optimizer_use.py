"""Schedulers, closures, scalers and hands on the optimizer: a step uses the values that stood when it was called."""

import copy
import warnings

import pytest

import gradcast
from training import compare
from training.models import TASKS
from training.needs import torch
from training.optimizers import Recipe
from training.pool import on_ranks
from training.sides import DDP, differences, net
from training.twins import Twins


@pytest.mark.parametrize("optimizer", ["sgd foreach", "adam plain", "adamw fused"])
@on_ranks(2)
def test_hyper_parameters_changed_after_step_are_for_the_next_step(rank, optimizer):
    twins = Twins(rank, "plain", optimizer)
    for number in range(8):
        twins.pending_step()
        for _, optimizer, _ in twins.each():
            for group in optimizer.param_groups:
                group["lr"] *= 0.5 if number % 2 else 3.0
                group["weight_decay"] = 0.1 * number
    return twins.differences()


@on_ranks(2)
def test_a_learning_rate_that_is_a_tensor_is_fixed_by_value(rank):
    """A learning rate that is a tensor, changed in place right after the step."""
    twins = Twins(rank, "plain", "adam foreach")
    for _, optimizer, _ in twins.each():
        optimizer.param_groups[0]["lr"] = torch.tensor(3e-3)
        optimizer.param_groups[0]["foreach"] = False
    for number in range(6):
        twins.pending_step()
        for _, optimizer, _ in twins.each():
            optimizer.param_groups[0]["lr"].mul_(0.5 if number % 2 else 1.5)
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
    rates = [optimizer.param_groups[0]["lr"] for _, optimizer, _ in twins.each()]
    found = twins.differences() + ([] if rates[0] == rates[1] else [f"learning rates {rates}"])
    twins.handle.detach()
    return found


def scheduler_warnings(rank):
    """torch warns when scheduler.step() seems to come before optimizer.step(); with gradcast it must see the latter."""
    twins = Twins(rank, "plain", "adamw plain")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        twins.train(4)
    twins.handle.detach()
    return [str(warning.message) for warning in caught]


def test_schedulers_do_not_warn(ranks):
    for messages in ranks.run(2, scheduler_warnings):
        assert not [message for message in messages if "scheduler" in message]


def closures(rank):
    twins = Twins(rank, "plain", "sgd foreach")
    values = []
    for _, _, optimizer, forward in twins.rounds(6):

        def closure(optimizer=optimizer, forward=forward):
            optimizer.zero_grad()
            loss = twins.task.loss(forward, twins.batch())
            loss.backward()
            return loss

        values.append(optimizer.step(closure).item())
    found = twins.differences() + compare.trees(values[1::2], values[0::2], "returned loss")
    twins.handle.detach()
    return found


def test_step_with_a_closure(ranks):
    for found in ranks.run(2, closures):
        assert found == []


def step_hooks(rank):
    """Hooks of the user's own on the optimizer run once per step."""
    twins = Twins(rank, "plain", "adam plain")
    counts = {}
    for side, (_, optimizer, _) in zip(("theirs", "ours"), twins.each(), strict=True):

        def count(*arguments, side=side):
            counts[side] = counts.get(side, 0) + 1

        optimizer.register_step_post_hook(count)
    twins.train(6)
    found = twins.differences()
    twins.handle.detach()
    return found, counts


def test_hooks_of_the_optimizer_run_once_per_step(ranks):
    for found, counts in ranks.run(2, step_hooks):
        assert found == []
        assert counts["ours"] == counts["theirs"] == 6


class CallsItsBase(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


def hooks_of_the_base_class(side):
    """torch calls them in the base class's step, too, once that has been used."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    module = net()
    optimizer = CallsItsBase(module.parameters(), lr=0.01, momentum=0.9)
    called = DDP(module) if side.name == "ddp" else module
    side.attach(called, optimizer, policy="p3", policy_parameters={"slice_elements": 50})
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
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3) for _ in range(2)]
    for number in range(8):
        for scaler, (module, optimizer, forward) in zip(scalers, twins.each(), strict=True):
            optimizer.zero_grad()
            loss = twins.task.loss(forward, twins.batch())
            scaler.scale(loss * (float("inf") if number == overflow_at else 1.0)).backward()
            if unscale:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        twins.after_step()
    found = twins.differences() + compare.trees(scalers[1].state_dict(), scalers[0].state_dict(), "scaler")
    twins.handle.detach()
    return found


@on_ranks(2)
def test_loading_a_checkpoint_in_the_middle_of_training(rank):
    """A checkpoint is loaded while a step is pending; what was pending is gone, as it would be without gradcast."""
    twins = Twins(rank, "plain", "adam plain")
    twins.train(3)
    saved = [
        (copy.deepcopy(module.state_dict()), copy.deepcopy(optimizer.state_dict()))
        for module, optimizer, _ in twins.each()
    ]
    twins.train(2)
    twins.pending_step()
    for (weights, state), (module, optimizer, _) in zip(saved, twins.each(), strict=True):
        module.load_state_dict(weights)
        optimizer.load_state_dict(state)
    found = twins.differences()
    twins.train(3)
    return found + twins.differences()


@on_ranks(2)
def test_two_optimizers_share_a_module(rank):
    """One optimizer for each half of the model, given to attach as a list."""
    task = TASKS["plain"]
    sides = []
    ours, theirs = task.module(seed=rank.index), task.module(seed=rank.index)
    for module in (theirs, ours):
        parameters = list(module.parameters())
        sides.append([torch.optim.SGD(parameters[:4], lr=0.1, momentum=0.9), torch.optim.Adam(parameters[4:], lr=1e-2)])
    ddp = torch.nn.parallel.DistributedDataParallel(theirs)
    handle = gradcast.attach(ours, sides[1], options=gradcast.Options(adapt=False, warmup_steps=3))
    for number in range(6):
        for forward, optimizers in ((ddp, sides[0]), (ours, sides[1])):
            for optimizer in optimizers:
                optimizer.zero_grad()
            task.loss(forward, task.batch(rank.index, number)).backward()
            for optimizer in optimizers:
                optimizer.step()
    handle.flush()
    found = compare.modules(ours, theirs)
    for mine, reference in zip(sides[1], sides[0], strict=True):
        found += compare.optimizers(mine, reference)
    handle.detach()
    return found


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


def maximizing(module):
    """Settings that change by hand in the middle of training."""
    return Recipe(torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9, maximize=True, weight_decay=0.01))


@on_ranks(2)
def test_settings_that_change_right_after_the_step(rank):
    twins = Twins(rank, "plain", maximizing)
    for number in range(10):
        twins.step()
        for _, optimizer, _ in twins.each():
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + number)
            optimizer.param_groups[0]["momentum"] = 0.5 + 0.04 * number
    return twins.differences()
