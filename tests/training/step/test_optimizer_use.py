"""Hands on the optimizer: a step uses the values that stood when it was called."""

import warnings

import pytest

from training.needs import torch
from training.optimizers import Recipe
from training.pool import on_ranks
from training.sides import DDP, differences, net
from training.twins import Twins


def tensor_rate(module):
    return Recipe(torch.optim.Adam(module.parameters(), lr=torch.tensor(3e-3), foreach=False))


@pytest.mark.parametrize("optimizer", ["sgd foreach", "adamw fused", tensor_rate])
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


@on_ranks(2)
def test_schedulers_do_not_warn(rank):
    """torch warns when scheduler.step() seems to come before optimizer.step(); with gradcast it must see the latter."""
    twins = Twins(rank, "plain", "adamw plain")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        twins.train(4)
    return [str(warning.message) for warning in caught if "scheduler" in str(warning.message)]


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
