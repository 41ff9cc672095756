"""Ranks that differ are told apart at attach: every rank raises, the sentence names the difference and the rank."""

import pytest

import gradcast
from training.attached import error_of
from training.needs import torch

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


def attempt(rank, module, optimizer=None, options=None):
    answer = error_of(lambda: gradcast.attach(module, optimizer, options=options))
    # The ranks are together again: the next collective of the user's own group matches.
    torch.distributed.barrier()
    return answer


def attach_different(rank, name, mode, wrong_rank):
    module = MODULES[name][0](rank.index == wrong_rank)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return attempt(rank, module, torch.optim.SGD(parameters, lr=0.1) if mode == "overlap" else None)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", MODULES)
def test_another_model_on_one_rank(ranks, name, world_size):
    wrong_rank = world_size - 1
    mode = "overlap" if world_size == 2 else "hook"
    for code, message in ranks.run(world_size, attach_different, name, mode, wrong_rank):
        assert code == "invalid_use", message
        for fragment in (f"rank {wrong_rank}", *MODULES[name][1]):
            assert fragment in message


def other_call(rank, what):
    module = nn.Linear(3, 3)
    if what == "mode":
        return attempt(rank, module, torch.optim.SGD(module.parameters(), lr=0.1) if rank.index else None)
    return attempt(rank, module, None, gradcast.Options(adapt=False, warmup_steps=3 + rank.index))


@pytest.mark.parametrize("what", ["warmup_steps", "mode"])
def test_another_call_on_one_rank(ranks, what):
    """With other steps of warm-up the ranks would agree on the plan at different steps. (Which plan it is, rank 0's
    options say.)"""
    for code, message in ranks.run(2, other_call, what):
        assert code == "invalid_use", message
        assert what in message
        assert "rank 1" in message


def wrong_on_one_rank(rank, wrong_rank):
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    part = module[1] if rank.index == wrong_rank else module
    return attempt(rank, module, torch.optim.SGD(part.parameters(), lr=0.1))


@pytest.mark.parametrize("wrong_rank", [0, 1])
def test_what_one_rank_refuses_raises_on_all(ranks, wrong_rank):
    """Otherwise the other ranks wait until their timeout for one that has left."""
    answers = ranks.run(2, wrong_on_one_rank, wrong_rank)
    for code, message in answers:
        assert code == "invalid_use", message
        assert "0.weight" in message
    assert f"rank {wrong_rank}" in answers[1 - wrong_rank][1]
