"""Clipping of modules that FSDP2 shards: native HSDP's numbers, and steps that certainly clip nothing wait for nothing.

The loop's own calls of torch's functions are carried out by gradcast.
"""

import functools
import gc
import math
import os
from unittest import mock

import pytest

import gradcast
from gradcast.training.step.clip_certificate import ClipCertificate
from training import compare, inside
from training.attached import not_refused
from training.needs import torch
from training.pool import on_ranks
from training.sharded import BUILDS, Net, Training, differences

pytestmark = pytest.mark.filterwarnings("ignore")
nn = torch.nn
STEPS = 12  # the norm falls from 0.4 to 0.065
NORMS = {"always": 0.01, "sometimes": 0.13, "never": 1e3}


def clip_norm(training: Training, number: int, max_norm: float, **settings) -> None:
    norm = nn.utils.clip_grad_norm_(training.module.parameters(), max_norm, **settings)
    if number % 3 == 0:
        training.seen[f"norm {number}"] = norm.full_tensor().detach().clone()


def clip_as_torchtitan(training: Training, number: int, max_norm: float) -> None:
    """The two calls, with the norm between, which some steps read, before step() or after it."""
    gradients = [each.grad for each in training.module.parameters() if each.grad is not None]
    norm = nn.utils.get_total_norm(gradients, 2.0, error_if_nonfinite=False, foreach=True)
    if hasattr(norm, "full_tensor"):
        norm = norm.full_tensor()
    nn.utils.clip_grads_with_norm_(training.module.parameters(), max_norm, norm, foreach=True)

    def read() -> None:
        training.seen[f"norm {number}"] = norm.detach().clone()

    if number % 3 == 0:
        read()
    training.after_step = read if number % 3 == 1 else lambda: None


def clip_unasked(training: Training, number: int, max_norm: float) -> None:
    """Only the options name it."""
    if training.handle is None:
        clip_norm(training, 1, max_norm)


def clip_between_reads(training: Training, number: int, max_norm: float) -> None:
    """Some ranks alone read a gradient before they clip, the norm before step(), and a parameter after it."""
    alone = training.rank.index == number % 4
    parameters = list(training.module.parameters())
    if alone and number % 2:
        training.module[1].up.weight.grad.to_local().sum().item()
    if number // 4 % 2:
        norm = nn.utils.clip_grad_norm_(parameters, max_norm).full_tensor()
    else:
        norm = nn.utils.get_total_norm([each.grad for each in parameters]).full_tensor()
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    if alone and number % 3:
        norm.item()
    training.after_step = lambda: training.module[3].weight.to_local().sum().item() if alone else None


def in_steps(training: Training, clip, max_norm: float, passes=(True,)) -> None:
    """``passes``: of a step, and whether each is averaged over the replicas."""
    training.after_step = lambda: None
    for number in range(STEPS):
        training.optimizer.zero_grad()
        for part, averaged in enumerate(passes):
            training.module.set_requires_all_reduce(averaged)
            training.backward(10 * number + part)
        clip(training, number, max_norm)
        training.optimizer.step()
        training.after_step()


def compared(rank, clip, max_norm: float, *, norm_type: float = 2.0, passes=(True,), **settings) -> list[str]:
    shares = []

    def loop(training: Training) -> None:
        in_steps(training, clip, max_norm, passes)
        if training.handle is not None:
            shares.append((training.handle.stats()["clipping"] or {}).get("certified_share"))

    found = differences(rank, "overlap", loop, clip=gradcast.Clip(norm=max_norm, norm_type=norm_type), **settings)
    return found + ([] if clip is clip_between_reads else wrong_share(max_norm, norm_type, shares[0]))


def wrong_share(max_norm: float, norm_type: float, share: float | None) -> list[str]:
    if share is None:  # of this norm there is no certificate
        return [] if norm_type == 3 else ["no share"]
    expected = {NORMS["always"]: share == 0, NORMS["never"]: share == 1, NORMS["sometimes"]: 0 < share < 1}
    return [] if expected.get(max_norm, True) else [f"{share} of the steps were certified at {max_norm}"]


CLIPS = clip_norm, clip_as_torchtitan, clip_unasked, clip_between_reads


@pytest.mark.parametrize("clip", [clip_as_torchtitan, clip_between_reads], ids=lambda clip: clip.__name__)
@on_ranks(4)
def test_the_loops_calls_clip_some_steps_as_native_hsdp(rank, clip):
    return compared(rank, clip, NORMS["sometimes"])


@pytest.mark.slow
@pytest.mark.parametrize("max_norm", ["always", "never"])
@pytest.mark.parametrize("clip", CLIPS, ids=lambda clip: clip.__name__)
@on_ranks(4)
def test_the_loops_calls_clip_as_native_hsdp(rank, clip, max_norm):
    return compared(rank, clip, NORMS[max_norm])


@pytest.mark.long
@pytest.mark.parametrize("max_norm", NORMS)
@pytest.mark.parametrize("passes", [(True, True), (False, True), (True, False, True)], ids=str)
@on_ranks(4)
def test_accumulated_gradients_are_clipped(rank, passes, max_norm):
    return compared(rank, clip_norm, 3 * NORMS[max_norm], passes=passes)


@pytest.mark.long
@pytest.mark.parametrize("norm_type", [1.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
@on_ranks(4)
def test_other_norms_clip_as_native_hsdp(rank, norm_type, max_norm):
    return compared(rank, functools.partial(clip_norm, norm_type=norm_type), max_norm, norm_type=norm_type)


@pytest.mark.long
@pytest.mark.parametrize("max_norm", NORMS)
@pytest.mark.parametrize("build", ["bf16 parameters", "bf16", "uneven shards", "a shard without a part", "frozen"])
@on_ranks(4)
def test_models_are_clipped_as_under_native_hsdp(rank, build, max_norm):
    return compared(rank, clip_norm, NORMS[max_norm] if max_norm != "sometimes" else 0.14, build=BUILDS[build])


@pytest.mark.slow
@pytest.mark.parametrize("max_norm", ["sometimes"])
@on_ranks(2)
def test_replicas_without_shards_are_clipped(rank, max_norm):
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.device_mesh import init_device_mesh

    def build(_):
        return replicate(Net(), mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("replicas",)))

    return compared(rank, clip_as_torchtitan, NORMS[max_norm], build=build)


@pytest.mark.slow
@on_ranks(4)
def test_values_are_clipped_as_under_native_hsdp(rank):
    def loop(training: Training) -> None:
        clip = lambda training, *_: nn.utils.clip_grad_value_(training.module.parameters(), 1e-3)  # noqa: E731
        in_steps(training, clip, 0)

    return differences(rank, "overlap", loop, clip=gradcast.Clip(value=1e-3))


@on_ranks(4)
def test_certified_steps_leave_their_updates_pending(rank):
    training = Training(rank, "overlap", clip=gradcast.Clip(norm=1e3))
    in_steps(training, clip_as_torchtitan, 1e3)
    return [] if inside.session_of(training.handle).pending_names() else ["nothing is pending"]


@on_ranks(4)
def test_a_wrong_certificate_is_found(rank):
    """In the next step: then all shards know the norm."""
    training = Training(rank, "overlap", clip=gradcast.Clip(norm=0.01))
    for number in range(5):
        training.step(number)
    with mock.patch.object(ClipCertificate, "power", lambda self, bounds, shards: bounds.sum() * 0):
        return not_refused(lambda: [training.step(number) for number in (5, 6)], "certified", code="internal")


@pytest.mark.slow
@pytest.mark.parametrize("clip", [clip_norm, clip_as_torchtitan])
@on_ranks(4)
def test_without_gradcast_the_loops_calls_clip_once(rank, clip):
    with mock.patch.dict(os.environ, {"GRADCAST_DISABLE": "1"}):
        ours = Training(rank, "overlap", clip=gradcast.Clip(norm=0.01))
    native = Training(rank, None)
    for each in (native, ours):
        in_steps(each, clip, 0.01)
    ours.handle = None
    return compare.trees(ours.result(), native.result())


@pytest.mark.parametrize("clip", [clip_norm, clip_as_torchtitan], ids=lambda clip: clip.__name__)
@on_ranks(4)
def test_a_loop_that_clips_otherwise_is_refused(rank, clip):
    training = Training(rank, "overlap", clip=gradcast.Clip(norm=1.0))
    wrong = "the loop's clip call clips with norm=2", "clip alike"
    return not_refused(lambda: in_steps(training, clip, 2.0), *wrong)


@on_ranks(4)
def test_detach_gives_torchs_functions_back(rank):
    gc.collect()  # modules of other tests
    nn.utils.clip_grad_norm_([torch.ones(1)], 1.0)
    before = nn.utils.clip_grad_norm_.__closure__[0].cell_contents
    handles = [Training(rank, "overlap", clip=gradcast.Clip(norm=1.0)).handle for _ in range(2)]
    replaced = nn.utils.clip_grad_norm_.__closure__[0].cell_contents is not before
    for handle in handles:
        handle.detach()
    restored = nn.utils.clip_grad_norm_.__closure__[0].cell_contents is before
    return [] if replaced and restored else [f"replaced: {replaced}, restored: {restored}"]
