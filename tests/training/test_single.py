"""With one worker gradcast has nothing to send: it measures for a few steps and then is not there."""

import copy

import pytest

from training import compare, optimizers
from training.attached import attach
from training.models import TASKS
from training.needs import torch
from training.pool import on_ranks
from training.test_copies import hooks_of


@pytest.mark.parametrize("with_group", [True, False])
@pytest.mark.parametrize(("mode", "optimizer"), [("overlap", "adamw fused"), ("hook", "sgd foreach")])
@on_ranks(1)
def test_one_worker_trains_as_without_gradcast(rank, mode, with_group, optimizer):
    if not with_group:
        torch.distributed.destroy_process_group()
    task = TASKS["transformer"]
    ours, theirs = task.module(seed=0), task.module(seed=0)
    recipes = [optimizers.make(optimizer, module) for module in (theirs, ours)]
    initial, step_before = copy.deepcopy(ours), vars(recipes[1].optimizer).get("step")
    handle = attach(ours, recipes[1].optimizer, mode)
    assert hooks_of(ours), "nothing is measured"
    found = compare.modules(ours, initial)
    for number in range(8):
        for module, recipe in zip((theirs, ours), recipes, strict=True):
            recipe.optimizer.zero_grad()
            task.loss(module, task.batch(0, number)).backward()
            recipe.optimizer.step()
            recipe.after_step()
        found += compare.modules(ours, theirs)
    assert not hooks_of(ours), "hooks stay after the measurement"
    stats = handle.stats()
    assert (stats["step"], stats["world_size"], stats["mode"]) == (3, 1, mode) or stats["step"] == 8
    assert handle.profile.world_size == 1
    handle.flush()
    handle.detach()
    assert vars(recipes[1].optimizer).get("step") == step_before
    return found + compare.optimizers(recipes[1].optimizer, recipes[0].optimizer)
