"""State of a parameter whose update is due is as pending as the parameter, however a program comes by it."""

import copy

import pytest

from training.needs import torch
from training.pool import on_ranks
from training.sides import DDP, differences, net

nn = torch.nn


def halved(values):
    with torch.no_grad():
        for value in values:
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                value.mul_(0.5)


def by_parameter(optimizer, parameters, held):
    for parameter in parameters:
        halved(optimizer.state[parameter].values())


def by_get(optimizer, parameters, held):
    for parameter in parameters:
        halved(optimizer.state.get(parameter, {}).values())


def by_items(optimizer, parameters, held):
    for _, state in optimizer.state.items():
        halved(state.values())


def by_values(optimizer, parameters, held):
    for state in optimizer.state.values():
        halved(state.values())


def by_a_tensor_taken_earlier(optimizer, parameters, held):
    halved(held)


def by_entry(optimizer, parameters, held):
    for parameter in parameters:
        optimizer.state[parameter] = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in optimizer.state[parameter].items()
        }


def forgotten(optimizer, parameters, held):
    optimizer.state.clear()


def one_forgotten(optimizer, parameters, held):
    optimizer.state.pop(parameters[2], None)


def by_state_dict(optimizer, parameters, held):
    state = optimizer.state_dict()
    for each in state["state"].values():
        halved(each.values())
    optimizer.load_state_dict(state)


def by_a_copy(optimizer, parameters, held):
    optimizer.load_state_dict(copy.deepcopy(optimizer).state_dict())


def by_a_new_dict(optimizer, parameters, held):
    """As a framework that moves state to another device."""
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                state[name] = value.to(torch.float64).to(torch.float32) * 0.5


WAYS = [
    by_parameter, by_get, by_items, by_values, by_a_tensor_taken_earlier, by_entry, forgotten, one_forgotten,
    by_state_dict, by_a_copy, by_a_new_dict,
]  # fmt: skip
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, eps=1e-3),
}


def edit(side, way, kind):
    module = net()
    ddp, optimizer = DDP(module), OPTIMIZERS[kind](module.parameters())
    side.attach(ddp, optimizer)
    for number in range(10):
        optimizer.zero_grad()
        ddp(side.batch(number)).square().sum().backward()
        held = [value for state in optimizer.state.values() for value in state.values()]
        optimizer.step()
        if number % 2 == 1:
            way(optimizer, list(module.parameters()), held)
    return side.result(module), optimizer.state_dict()["state"]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@on_ranks(2)
def test_state_that_is_edited_between_steps_is_what_it_is_with_ddp(rank, way, kind):
    return differences(rank, edit, "overlap", way, kind)
