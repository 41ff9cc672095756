"""With one worker gradcast has nothing to send: it measures for a few steps and then is not there."""

import copy

import pytest

import gradcast
from training import compare, optimizers
from training.attached import attach
from training.models import TASKS
from training.needs import torch
from training.plan.test_pinned import save_plan
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


def refusal(rank, given):
    """The error of attach or of a step; None if training goes on."""
    task = TASKS["mixed64"]
    module = task.module(seed=0)
    optimizer = optimizers.make("adam plain", module).optimizer
    try:
        plan = gradcast.Planning(
            adapt=False, warmup_steps=3, **{name: each for name, each in given.items() if name != "clip"}
        )
        handle = attach(module, optimizer, plan=plan, clip=gradcast.Clip(norm=given.get("clip")))
        for number in range(8):
            optimizer.zero_grad()
            task.loss(module, task.batch(rank.index, number)).backward()
            optimizer.step()
        handle.detach()
        return None
    except gradcast.Error as error:
        return error.code, str(error)
    finally:
        torch.distributed.barrier()


REFUSED = {
    "no file": ({"file": "/no/such"}, "the plan /no/such does not exist"),
    "no plan": ({"file": "text.json"}, "is not valid JSON"),
    "another model": ({"file": "plain/plan.json"}, "is a plan for another model: only one of the two has"),
    "another mode": ({"file": "hook/plan.json"}, "is a plan for hook mode; this training is in overlap mode"),
    "other tensors": ({"file": "overlap/plan.json", "clip": 1.0}, "of other sizes or types, or with other clipping"),
    "a parameter": ({"policy": "p3", "policy_parameters": {"slice_elements": -3}}, "slice_elements of policy p3 is -3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_one_worker_refuses_what_two_would(ranks, tmp_path, name):
    options, words = REFUSED[name]
    plan = options.get("file", "")
    if plan == "text.json":
        (tmp_path / plan).write_text("{")
    elif not plan.startswith("/") and plan:
        kind = plan.partition("/")[0]
        (tmp_path / kind).mkdir()
        task = "plain" if kind == "plain" else "mixed64"
        ranks.run(2, save_plan, str(tmp_path / kind), task, "hook" if kind == "hook" else "overlap")
    options = options | ({"file": str(tmp_path / plan)} if plan else {})
    alone, (first, second) = ranks.run(1, refusal, options)[0], ranks.run(2, refusal, options)
    code, sentence = alone
    assert first == alone
    assert second == (code, f"the agreement on the plan failed on rank 0 of 2: {sentence}")
    assert words in sentence


def test_one_worker_takes_what_two_follow(ranks, tmp_path):
    """Of a model with module buffers, which are sent with the gradients."""
    ranks.run(2, save_plan, str(tmp_path), "mixed64", "overlap")
    options = {"file": str(tmp_path / "plan.json")}
    assert ranks.run(2, refusal, options) + ranks.run(1, refusal, options) == [None] * 3
