"""A plan file pins the plan: it is followed to the byte, or refused with a sentence on every rank."""

import dataclasses
import json
import os
from itertools import pairwise
from unittest import mock

import pytest

import gradcast
from gradcast.files import load_plan, plan_hash
from training.attached import not_refused, planning
from training.needs import torch
from training.pair import Training
from training.plain import beside_plain_loop


def save_plan(rank, folder, task, mode):
    ours = Training(rank.index, task, "sgd plain", mode=mode)
    ours.train(4)
    ours.handle.flush()
    if rank.index == 0:
        ours.handle.save_plan(f"{folder}/plan.json")
        ours.handle.save_profile(f"{folder}/profile.json")
    ours.handle.detach()


def make_by_hand(folder, mode):
    """A plan that no policy would make: blocks of two ranges, of one element, and in an order of nobody's use."""
    _, made_with = load_plan(str(folder / "plan.json"))
    profile = gradcast.load_profile(str(folder / "profile.json"))
    blocks = []
    for buffer in sorted({tensor.buffer for tensor in profile.tensors}):
        members = [tensor for tensor in profile.tensors if tensor.buffer == buffer]
        end, size = sum(tensor.bytes for tensor in members), members[0].element_bytes
        cuts = [0, size, *(end * i // 7 // size * size for i in range(1, 7)), end]
        ranges = list(pairwise(cuts))
        for parts in ([6], [1, 3], [0], [5], [2, 4, 7]):
            blocks.append(gradcast.Block(buffer=buffer, ranges=[ranges[part] for part in parts], reason="by hand"))
    plan = gradcast.Plan(blocks=blocks, policy="by hand", mode=mode, in_flight=2)
    plan.check(profile)
    path = folder / "by_hand.json"
    made_with["hash"] = plan_hash(plan, profile)
    path.write_text(plan.replace(extra={"made_with": made_with}).to_json())
    return path, [(block.buffer, block.ranges) for block in plan.blocks]


def follow_pinned(rank, path, by_variable, mode, expected):
    with mock.patch.dict(os.environ, {"GRADCAST_PLAN": path} if by_variable else {}):
        plan = dataclasses.replace(planning(), file=None if by_variable else path)
        ours = Training(rank.index, "mixed64", "adam plain", mode=mode, plan=plan)
        found, _, (*_, followed) = beside_plain_loop(ours, "adam plain", 8)
    assert followed.policy == "by hand"
    assert [(block.buffer, block.ranges) for block in followed.blocks] == expected
    assert ours.handle.stats()["packed_bytes"] > 0
    ours.handle.detach()
    return found


@pytest.mark.parametrize(
    ("by_variable", "mode", "world_size"), [(False, "overlap", 3), (True, "overlap", 2), (False, "hook", 2)]
)
def test_a_pinned_plan_is_followed_to_the_byte(ranks, tmp_path, by_variable, mode, world_size):
    ranks.run(world_size, save_plan, str(tmp_path), "mixed64", mode)
    path, blocks = make_by_hand(tmp_path, mode)
    assert not any(ranks.run(world_size, follow_pinned, str(path), by_variable, mode, blocks))


def refused(rank, path, code, said):
    """The error of attach or of a step, whichever comes."""
    plan = dataclasses.replace(planning(), file=path)
    found = not_refused(lambda: Training(rank.index, "mixed64", "adam plain", plan=plan).train(6), said, code=code)
    torch.distributed.barrier()
    return found


def require_refusal(ranks, path, said, code="invalid_plan"):
    assert ranks.run(2, refused, str(path), code, said) == [[], []]


@pytest.mark.parametrize(
    ("task", "mode", "said"), [("plain", "overlap", "another model"), ("mixed64", "hook", "hook mode")]
)
def test_a_plan_for_another_model_or_mode_is_refused(ranks, tmp_path, task, mode, said):
    ranks.run(2, save_plan, str(tmp_path), task, mode)
    require_refusal(ranks, tmp_path / "plan.json", said)


@pytest.mark.parametrize("text", ["", "{}", "[1, 2]", '{"version": 1, "blocks": []}'])
def test_a_file_that_is_no_plan_is_refused(ranks, tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    require_refusal(ranks, path, "plan.json")


def test_a_plan_that_is_not_there_is_refused(ranks, tmp_path):
    require_refusal(ranks, tmp_path / "nowhere.json", "nowhere.json", code="invalid_option")


def test_a_plan_whose_blocks_were_changed_is_refused(ranks, tmp_path):
    ranks.run(2, save_plan, str(tmp_path), "mixed64", "overlap")
    fields = json.loads((tmp_path / "plan.json").read_text())
    fields["blocks"] = fields["blocks"][:-1]
    (tmp_path / "plan.json").write_text(json.dumps(fields))
    require_refusal(ranks, tmp_path / "plan.json", "is in no block")
