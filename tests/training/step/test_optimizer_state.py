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


def by_entry(optimizer, parameters, held):
    for parameter in parameters:
        optimizer.state[parameter] = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in optimizer.state[parameter].items()
        }


def by_state_dict(optimizer, parameters, held):
    state = optimizer.state_dict()
    for each in state["state"].values():
        halved(each.values())
    optimizer.load_state_dict(state)


def by_a_new_dict(optimizer, parameters, held):
    """As a framework that moves state to another device."""
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                state[name] = value.to(torch.float64).to(torch.float32) * 0.5


# ``held``: tensors of the state, taken before the step.
WAYS = {
    "by_parameter": lambda optimizer, parameters, held: [halved(optimizer.state[p].values()) for p in parameters],
    "by_get": lambda optimizer, parameters, held: [halved(optimizer.state.get(p, {}).values()) for p in parameters],
    "by_items": lambda optimizer, parameters, held: [halved(state.values()) for _, state in optimizer.state.items()],
    "by_values": lambda optimizer, parameters, held: [halved(state.values()) for state in optimizer.state.values()],
    "by_a_tensor_taken_earlier": lambda optimizer, parameters, held: halved(held),
    "by_entry": by_entry,
    "forgotten": lambda optimizer, parameters, held: optimizer.state.clear(),
    "one_forgotten": lambda optimizer, parameters, held: optimizer.state.pop(parameters[2], None),
    "by_state_dict": by_state_dict,
    "by_a_copy": lambda optimizer, parameters, held: optimizer.load_state_dict(copy.deepcopy(optimizer).state_dict()),
    "by_a_new_dict": by_a_new_dict,
}
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
            WAYS[way](optimizer, list(module.parameters()), held)
    return side.result(module), optimizer.state_dict()["state"]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_state_that_is_edited_between_steps_is_what_it_is_with_ddp(rank, way, kind):
    return differences(rank, edit, "overlap", way, kind)
