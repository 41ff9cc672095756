"""Other tensors in a module's places: for one call, for tracing, or another dtype from now on."""

import copy

import pytest

from training.attached import attach, not_refused
from training.models import TASKS
from training.needs import torch
from training.pool import on_ranks
from training.sides import DDP, differences, net

nn = torch.nn


def converted(side, convert):
    """In the middle of training; gradcast gets the bare module, for which DDP needs a new wrapper."""
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    called = side.called(module, optimizer)
    for number in range(10):
        if number == 6:
            convert(module)
            called = DDP(module) if side.name == "ddp" else module
        optimizer.zero_grad()
        called(side.batch(number).to(module[0].weight.dtype)).square().sum().backward()
        optimizer.step()
    return side.result(module)


CONVERSIONS = {
    "double": lambda module: module.double(),
    "bfloat16": lambda module: module.to(torch.bfloat16),
    "a part": lambda module: module[2].to(torch.float32),
    "back and forth": lambda module: module.double().float(),
}


@pytest.mark.parametrize("name", CONVERSIONS)
@on_ranks(2)
def test_another_dtype_in_mid_run(rank, name, mode):
    return differences(rank, converted, mode, CONVERSIONS[name])


def traced(side):
    module = net()
    ddp, optimizer = DDP(module), torch.optim.SGD(module.parameters(), lr=0.1)
    side.attach(ddp, optimizer)
    outputs = []
    for number in range(8):
        optimizer.zero_grad()
        ddp(side.batch(number)).square().sum().backward()
        optimizer.step()
        if number in (5, 7):
            outputs.append(torch.jit.trace(module, side.batch(99))(side.batch(98)).detach().clone())
    return outputs, side.result(module)


@on_ranks(2)
def test_a_module_is_traced_after_a_step(rank, mode):
    return differences(rank, traced, mode)


def other_tensors(side, kind, ranks):
    """functional_call on a bare module that gradcast is attached to, as meta-learning does it."""
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    called = side.called(module, optimizer)
    seen = []
    for number in range(8):
        optimizer.zero_grad()
        called(side.batch(number)).square().sum().backward()
        optimizer.step()
        if side.rank not in ranks:
            continue
        make = nn.Parameter if kind == "parameters" else lambda value: value.requires_grad_(kind == "leaves")
        others = {name: make(p.detach() * 0.5) for name, p in module.named_parameters()}
        out = torch.func.functional_call(module, others, (side.batch(50 + number),))
        if kind != "constants":
            out.square().sum().backward()
            seen.append([each.grad.clone() for each in others.values()])
        seen.append(out.detach().clone())
    return seen, side.result(module)


@pytest.mark.parametrize("ranks_that_do", [(0, 1), (1,)], ids=["all ranks", "one rank"])
@pytest.mark.parametrize("kind", ["constants", "leaves", "parameters"])
@on_ranks(2)
def test_functional_call_with_other_tensors(rank, kind, ranks_that_do, mode):
    return differences(rank, other_tensors, mode, kind, ranks_that_do)


def assigned_state(rank, mode):
    """load_state_dict(assign=True) puts other parameters into the module."""
    task, module = TASKS["plain"], TASKS["plain"].module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    attach(module, optimizer, mode)
    task.loss(module, task.batch(rank.index, 0)).backward()
    optimizer.step()
    module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)
    refused = not_refused(lambda: task.loss(module, task.batch(rank.index, 1)).backward(), "not in the module")
    return refused, [float(p.grad.sum()) for p in module.parameters() if p.grad is not None]


def test_parameters_that_are_replaced_by_load_state_dict(ranks):
    """In overlap mode the optimizer would go on updating the old ones; in hook mode the new ones travel."""
    assert ranks.run(2, assigned_state, "overlap") == [([], [])] * 2
    (refused, sums), (_, others) = ranks.run(2, assigned_state, "hook")
    assert refused == ["None: no error"]
    assert sums == others
    assert len(sums) == 10
