"""Everything that training loops do around backward() and step() gives DDP's result, bit for bit with two ranks."""

import contextlib

import pytest

from training.needs import torch
from training.pool import on_ranks
from training.twins import Twins


def clip_norm(module, optimizer):
    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.05)


def clip_value(module, optimizer):
    torch.nn.utils.clip_grad_value_(module.parameters(), 1e-3)


def scale_in_place(module, optimizer):
    for parameter in module.parameters():
        parameter.grad.mul_(0.5)


def replace_gradient(module, optimizer):
    for parameter in module.parameters():
        parameter.grad = parameter.grad * 0.5


def replace_unread(module, optimizer):
    """Nobody asks for the old gradient, so nobody waits for it."""
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)


def write_through_data(module, optimizer):
    """``grad.data`` raises no version counter."""
    for parameter in module.parameters():
        parameter.grad.data.clamp_(-1e-3, 1e-3)


def only_read(module, optimizer):
    assert all(torch.isfinite(parameter.grad).all() for parameter in module.parameters())


def write_some(module, optimizer):
    module[2].weight.grad.add_(1e-3)


def decay_weights(module, optimizer):
    """Decoupled weight decay by hand, as some recipes write it."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1 - 1e-3)


CHANGES = [
    clip_norm, clip_value, scale_in_place, replace_gradient, replace_unread, write_through_data, only_read, write_some,
    decay_weights,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@on_ranks(2)
def test_gradients_can_be_read_and_changed_before_the_step(rank, change):
    """In every step, and then in every other one, so that plain and changed steps follow each other."""
    twins = Twins(rank, "plain", "sgd foreach")
    for changes in (True, True, True, True, True, False, True, False, True):
        twins.step(between=change if changes else None)
    return twins.differences()


@on_ranks(2)
def test_every_form_of_zeroing_gradients_works_and_forms_mix(rank):
    twins = Twins(rank, "plain", "adam plain")
    forms = [
        lambda module, optimizer: optimizer.zero_grad(),
        lambda module, optimizer: optimizer.zero_grad(set_to_none=False),
        lambda module, optimizer: module.zero_grad(),
        lambda module, optimizer: module.zero_grad(set_to_none=False),
        lambda module, optimizer: [setattr(p, "grad", None) for p in module.parameters()],
        lambda module, optimizer: [p.grad.zero_() for p in module.parameters()],
        lambda module, optimizer: torch._foreach_zero_([p.grad for p in module.parameters()]),
    ]
    for number, module, optimizer, forward in twins.rounds(3 * len(forms)):
        if number:
            forms[number % len(forms)](module, optimizer)
        twins.task.loss(forward, twins.batch()).backward()
        optimizer.step()
    return twins.differences()


@pytest.mark.parametrize("optimizer", ["adam plain", "adam foreach", "sgd fused"])
@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(2)
def test_zeroing_right_after_the_step_does_not_zero_what_travels(rank, set_to_none, optimizer):
    """The order of many loops: backward, step, zero_grad; so the gradients are pending when they are zeroed."""
    twins = Twins(rank, "plain", optimizer)
    for _ in range(6):
        twins.pending_step()
        for _, each, _ in twins.each():
            each.zero_grad(set_to_none=set_to_none)
    left = [n for m in twins.modules for n, p in m.named_parameters() if p.grad is not None and p.grad.any()]
    return twins.differences() + left


@pytest.mark.parametrize("wrap", [False, True])
@on_ranks(2)
def test_gradients_accumulate_without_communication(rank, wrap, mode):
    """Three backward passes to a step, the first two of them without communication."""
    twins = Twins(rank, "convnet", "adam plain", mode=mode, wrap=wrap)
    for number, module, optimizer, forward in twins.rounds(6):
        optimizer.zero_grad()
        for part in range(3):
            quiet = forward.no_sync() if wrap else twins.no_sync(module)
            with quiet if part < 2 else contextlib.nullcontext():
                twins.task.loss(forward, twins.task.batch(rank.index, 3 * number + part)).backward()
        optimizer.step()
    return twins.differences()
