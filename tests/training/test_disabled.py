"""GRADCAST_DISABLE=1: the same script, with stock DDP."""

import contextlib
import gc
import os
from unittest import mock

import pytest

import gradcast
from training import compare
from training.attached import attach, error_of, not_refused
from training.models import TASKS
from training.needs import torch
from training.pair import Pair
from training.pool import on_ranks

nn = torch.nn
disabling = mock.patch.dict(os.environ, GRADCAST_DISABLE="1")


@pytest.mark.parametrize("wrap", [False, True])
@on_ranks(2)
@disabling
def test_everything_is_left_to_ddp(rank, mode, wrap):
    pair = Pair(rank, "convnet", mode=mode, wrap=wrap)
    handle, module, task = pair.handle, pair.ours.module, pair.ours.task
    for number, side in pair.rounds(8):
        side.optimizer.zero_grad()
        with side.no_sync():
            task.loss(side.forward, side.batch(100 + number)).backward()
        side.loss().backward()
        side.optimizer.step()
    found = pair.differences()
    facts = (handle.mode, handle.plan, handle.profile, handle.stats()["mode"], handle.layout, handle.plan_version)
    assert facts == ("ddp", None, None, "ddp", (), 0)
    handle.load_state_dict(handle.state_dict())
    assert error_of(lambda: handle.save_plan("plan.json")) == (
        "invalid_use",
        "there is no plan: a single worker, or GRADCAST_DISABLE is set",
    )
    handle.detach()
    if not wrap:  # an ordinary module again: this rank's own gradients
        parameters = list(module.parameters())
        before = [p.grad.clone() for p in parameters]
        task.loss(module, pair.ours.batch(50)).backward()
        local = torch.autograd.grad(task.loss(module, pair.ours.batch(50)), parameters)
        added = [p.grad - b for p, b in zip(parameters, before, strict=True)]
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(added, local, strict=True))
    return found


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.main, self.aux = nn.BatchNorm1d(12), nn.Linear(12, 10), nn.Linear(12, 10)

    def forward(self, x):
        x = self.norm(x)
        return self.main(x), self.aux(x)


@on_ranks(2)
@disabling
def test_a_bare_module_may_do_what_it_may_with_gradcast(rank):
    """An output that the loss leaves out, nested no_sync, evaluation on rank 0 alone."""
    task, module = TASKS["plain"], TwoOutputs()
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    handle = gradcast.attach(module, sgd)
    for number in range(4):
        sgd.zero_grad()
        inputs, targets = task.batch(rank.index, number)
        with handle.no_sync():
            with handle.no_sync():
                pass
            nn.functional.cross_entropy(module(inputs)[0], targets).backward()
        local = module.main.weight.grad.norm().item()
        nn.functional.cross_entropy(module(inputs)[0], targets).backward()
        sgd.step()
        if rank.index == 0:
            module.eval()
            with torch.no_grad():
                module(inputs)
            module.train()
    handle.detach()
    assert len(set(rank.gather("digest", compare.digest(module)))) == 1
    assert len(set(rank.gather("local", local))) == 2, "under no_sync nothing was averaged"
    assert module.aux.weight.grad is None  # a sum would be 0 on all


@on_ranks(2)
@disabling
def test_clipping_inside_stays(rank):
    """What gradcast was asked to do in the step, it still does."""
    pair = Pair(rank, clip=gradcast.Clip(norm=0.05))
    for _, side in pair.rounds(5):
        side.optimizer.zero_grad()
        side.loss().backward()
        if side is pair.theirs:
            torch.nn.utils.clip_grad_norm_(side.module.parameters(), 0.05)
        side.optimizer.step()
    found = compare.modules(*reversed(pair.modules))
    pair.handle.detach()
    assert "step" not in vars(pair.ours.optimizer)
    return found


@on_ranks(2)
def test_on_one_rank_alone_it_is_refused(rank):
    with disabling if rank.index == 1 else contextlib.nullcontext():
        return not_refused(lambda: gradcast.attach(nn.Linear(2, 2)), "ddp mode")


def test_another_value_is_refused(monkeypatch):
    monkeypatch.setenv("GRADCAST_DISABLE", "yes")
    with pytest.raises(gradcast.Error, match="GRADCAST_DISABLE is 'yes'"):
        gradcast.attach(nn.Linear(2, 2))


@on_ranks(1)
@disabling
def test_a_module_is_free_when_what_was_attached_is_gone(rank):
    module = nn.Linear(3, 3)
    attach(module, None, "hook")
    gc.collect()
    handle = attach(module, None, "hook")
    assert handle.mode == "ddp"
    handle.detach()
