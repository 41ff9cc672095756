"""With one worker gradcast has nothing to send: it measures for a few steps and then is not there."""

import copy

import pytest

import gradcast
from training import compare, optimizers
from training.models import TASKS
from training.needs import torch
from training.test_copies import hooks_of


def train_alone(rank, mode, with_group, optimizer_name):
    if not with_group:
        torch.distributed.destroy_process_group()
    task = TASKS["transformer"]
    ours, theirs = task.module(seed=0), task.module(seed=0)
    recipes = [optimizers.make(optimizer_name, module) for module in (theirs, ours)]
    initial, step_before = copy.deepcopy(ours), vars(recipes[1].optimizer).get("step")
    handle = gradcast.attach(
        ours, recipes[1].optimizer if mode == "overlap" else None, options=gradcast.Options(adapt=False, warmup_steps=3)
    )
    hooks = [len(hooks_of(ours))]
    found = compare.modules(ours, initial)
    for number in range(8):
        for module, recipe in zip((theirs, ours), recipes, strict=True):
            recipe.optimizer.zero_grad()
            task.loss(module, task.batch(0, number)).backward()
            recipe.optimizer.step()
            recipe.after_step()
        found += compare.modules(ours, theirs)
    hooks.append(len(hooks_of(ours)))
    found += compare.optimizers(recipes[1].optimizer, recipes[0].optimizer)
    stats, profile = handle.stats(), handle.profile
    handle.flush()
    handle.detach()
    restored = vars(recipes[1].optimizer).get("step") == step_before
    return found, hooks, stats, profile.to_json(), restored


@pytest.mark.parametrize("with_group", [True, False])
@pytest.mark.parametrize(("mode", "optimizer"), [("overlap", "adamw fused"), ("hook", "sgd foreach")])
def test_one_worker_trains_as_without_gradcast(ranks, mode, with_group, optimizer):
    [(found, hooks, stats, profile, restored)] = ranks.run(1, train_alone, mode, with_group, optimizer)
    assert found == []
    assert hooks[0] > 0, "nothing was measured"
    assert hooks[1] == 0, "hooks stay after the measurement"
    assert (stats["step"], stats["world_size"], stats["mode"]) == (3, 1, mode) or stats["step"] == 8
    assert gradcast.Profile.from_json(profile).world_size == 1
    assert restored
