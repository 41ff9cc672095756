"""Ranks that differ are told apart: every rank raises, and the sentence names the difference and the rank. In what they
may differ, they agree on plan and order."""

import contextlib
from unittest import mock

import pytest

import gradcast
from training import compare
from training.attached import Attached, attach, error_of, not_refused, planning
from training.needs import torch
from training.pair import Training
from training.pool import on_ranks

pytest.importorskip("training.needs")
from gradcast.training.plan import agreement

nn = torch.nn


def linears(*outputs, **options):
    return nn.Sequential(*(nn.Linear(3, count, **options) for count in outputs))


def named(*names):
    return nn.ModuleDict({name: nn.Linear(3, 3) for name in names})


def with_scale(count):
    module = linears(3)
    module.register_buffer("scale", torch.ones(count))
    return module


def strided(other):
    module = nn.Sequential(nn.Linear(3, 3), nn.Conv2d(3, 4, 3))
    return module.to(memory_format=torch.channels_last) if other else module


def frozen(module, *parameters):
    for name in parameters:
        module.get_parameter(name).requires_grad_(False)
    return module


# The module, as it is on one rank or on the others, and what both sides of the difference are called.
MODULES = {
    "strides": (strided, ["1.weight", "strides"]),
    "shape of a frozen parameter": (
        lambda other: frozen(linears(3, 5 if other else 4), "1.weight", "1.bias"),
        ["frozen 1.weight", "(4, 3)", "(5, 3)"],
    ),
    "shape": (lambda other: linears(3, 5 if other else 4), ["1.weight", "(4, 3)", "(5, 3)"]),
    "name": (lambda other: named("first", "other" if other else "second"), ["second.weight", "other.weight"]),
    "type": (lambda other: linears(3, dtype=torch.float64 if other else None), ["0.weight", "float32", "float64"]),
    "one more": (lambda other: linears(*[3] * (3 if other else 2)), ["2.weight"]),
    "one less": (lambda other: linears(*[3] * (2 if other else 3)), ["2.weight"]),
    "order": (lambda other: named(*("ba" if other else "ab")), ["a.weight", "b.weight"]),
    "one is frozen": (lambda other: frozen(linears(3, 3), *(["1.weight"] if other else [])), ["1.weight"]),
    "buffer": (lambda other: with_scale(2 if other else 3), ["scale"]),
}


def not_refused_everywhere(attach, *words):
    found = not_refused(attach, *words)
    # The ranks are together again: the next collective of the user's own group matches.
    torch.distributed.barrier()
    return found


def different_model(rank, name, mode):
    """On the last rank."""
    make, words = MODULES[name]
    module = make(rank.index == rank.size - 1)
    sgd = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    return not_refused_everywhere(lambda: attach(module, sgd, mode), f"rank {rank.size - 1}", *words)


@pytest.mark.parametrize(("world_size", "mode"), [(2, "overlap"), (3, "hook")])
@pytest.mark.parametrize("name", MODULES)
def test_another_model_on_one_rank(ranks, name, world_size, mode):
    assert not any(ranks.run(world_size, different_model, name, mode))


@pytest.mark.parametrize("what", ["options.plan.warmup_steps", "mode"])
@on_ranks(2)
def test_another_call_on_one_rank(rank, what):
    """With other steps of warm-up the ranks would agree on the plan at different steps. (Which plan it is, rank 0's
    options say.)"""
    module = nn.Linear(3, 3)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    mode = "overlap" if what == "mode" and rank.index else "hook"
    plan = planning(warmup_steps=3 + (rank.index if what != "mode" else 0))
    return not_refused_everywhere(lambda: attach(module, sgd, mode, plan=plan), what, "rank 1")


@pytest.mark.parametrize("wrong_rank", [0, 1])
@on_ranks(2)
def test_what_one_rank_refuses_raises_on_all(rank, wrong_rank):
    """Otherwise the other ranks wait until their timeout for one that has left."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    part = module[1] if rank.index == wrong_rank else module
    words = ["0.weight"] if rank.index == wrong_rank else ["0.weight", f"rank {wrong_rank}"]
    return not_refused_everywhere(lambda: attach(module, torch.optim.SGD(part.parameters(), lr=0.1)), *words)


@on_ranks(2)
def test_a_new_parameter_that_one_rank_refuses(rank):
    """A layer that no optimizer knows, on one rank: an error in every step on all, not in the first one alone."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    attached = Attached(module)
    codes = []
    for number in range(6):
        if number == 3:
            module.append(nn.Linear(1, 1))
            if rank.index == 1:
                attached.optimizer.add_param_group({"params": list(module[2].parameters())})
        codes.append(error_of(lambda: attached.step(torch.ones(2, 4)))[0])
    return compare.trees(codes, [None] * 3 + ["invalid_use"] * 3, "codes")


@pytest.mark.parametrize("left_out", [1, 6])
@on_ranks(2)
def test_a_step_that_one_rank_leaves_out_raises_on_all(rank, mode, left_out):
    """In the warm-up, and with a plan: its parameters are older than those of the other rank."""
    attached = Attached(nn.Linear(4, 1), mode)

    def differing():
        for number in range(9):
            attached.optimizer.zero_grad()
            attached.module(torch.ones(2, 4)).sum().backward()
            if (rank.index, number) != (1, left_out):
                attached.optimizer.step()
        attached.handle.flush()

    return not_refused(differing, "since its parameters last changed")


@pytest.mark.parametrize("name", ["compare_every", "clip.norm", "wire"])
@on_ranks(2)
def test_options_that_differ_between_ranks(rank, name):
    values = {"compare_every": (0, 5), "clip.norm": (1.0, 2.0), "wire": ("fp32", "bf16")}[name]
    own = values[rank.index]
    options = {"clip": gradcast.Clip(norm=own)} if name == "clip.norm" else {name: own}
    sentence = f"options.{name} is {values[0]} on rank 0 and {values[1]} on rank 1; give all ranks the same"
    return not_refused(lambda: Attached(nn.Linear(2, 2), **options), sentence)


@on_ranks(3)
def test_a_plan_that_differs_on_one_rank(rank):
    """One rank comes to another plan than the others, as by a fault of memory."""
    true_hash = agreement.plan_hash
    wrong = mock.patch.object(agreement, "plan_hash", lambda *of: "0" + true_hash(*of)[1:])
    words = "the ranks do not agree on the plan", "rank 1"
    with wrong if rank.index == 1 else contextlib.nullcontext():
        return not_refused(lambda: Training(rank.index, "plain", "sgd plain"), *words, code="invalid_plan")
