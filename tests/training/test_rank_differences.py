"""Ranks that differ are told apart at attach: every rank raises, the sentence names the difference and the rank."""

import pytest

import gradcast
from training.needs import torch

nn = torch.nn


def other_shape(rank):
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 5 if rank == 1 else 4))


def other_name(rank):
    module = nn.Module()
    module.first = nn.Linear(3, 3)
    setattr(module, "other" if rank == 1 else "second", nn.Linear(3, 3))
    return module


def other_dtype(rank):
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, dtype=torch.float64 if rank == 1 else torch.float32))


def one_more(rank):
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(3 if rank == 1 else 2)))


def one_less(rank):
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(2 if rank == 1 else 3)))


def other_order(rank):
    module = nn.Module()
    for name in ("second", "first") if rank == 1 else ("first", "second"):
        setattr(module, name, nn.Linear(3, 3))
    return module


def one_frozen(rank):
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight.requires_grad_(rank != 1)
    return module


def other_buffer(rank):
    module = nn.Sequential(nn.Linear(3, 3))
    module.register_buffer("scale", torch.ones(2 if rank == 1 else 3))
    return module


# function: what both sides of the difference are called
def other_strides(variant):
    module = nn.Sequential(nn.Linear(3, 3), nn.Conv2d(3, 4, 3))
    return module.to(memory_format=torch.channels_last) if variant else module


def other_frozen_shape(variant):
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 5 if variant else 4))
    module[1].requires_grad_(False)
    return module


MODULES = {
    other_strides: ("1.weight", "strides"),
    other_frozen_shape: ("frozen 1.weight", "(4, 3)", "(5, 3)"),
    other_shape: ("1.weight", "(4, 3)", "(5, 3)"),
    other_name: ("second.weight", "other.weight"),
    other_dtype: ("1.weight", "float32", "float64"),
    one_more: ("2.weight",),
    one_less: ("2.weight",),
    other_order: ("first.weight", "second.weight"),
    one_frozen: ("1.weight",),
    other_buffer: ("scale",),
}


def attach_different(rank, name, mode, wrong_rank):
    function = {function.__name__: function for function in MODULES}[name]
    module = function(1 if rank.index == wrong_rank else 0)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return attempt(rank, module, torch.optim.SGD(parameters, lr=0.1) if mode == "overlap" else None)


def attempt(rank, module, optimizer=None, options=None):
    try:
        gradcast.attach(module, optimizer, options=options)
    except gradcast.Error as error:
        # The ranks are together again: the next collective of the user's own group matches.
        torch.distributed.barrier()
        return error.code, str(error)
    return None, "it was accepted"


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("function", MODULES, ids=lambda function: function.__name__)
def test_another_model_on_one_rank(ranks, function, world_size):
    wrong_rank = world_size - 1
    mode = "overlap" if world_size == 2 else "hook"
    for code, message in ranks.run(world_size, attach_different, function.__name__, mode, wrong_rank):
        assert code == "invalid_use", message
        assert f"rank {wrong_rank}" in message
        for fragment in MODULES[function]:
            assert fragment in message


def other_warmup(rank):
    return attempt(rank, nn.Linear(3, 3), None, gradcast.Options(adapt=False, warmup_steps=3 + rank.index))


def test_another_warmup_on_one_rank(ranks):
    """Then the ranks would agree on the plan at different steps. (Which plan it is, rank 0's options say.)"""
    for code, message in ranks.run(2, other_warmup):
        assert code == "invalid_use", message
        assert "warmup_steps" in message
        assert "rank 1" in message


def other_mode(rank):
    module = nn.Linear(3, 3)
    return attempt(rank, module, torch.optim.SGD(module.parameters(), lr=0.1) if rank.index else None)


def test_another_mode_on_one_rank(ranks):
    for code, message in ranks.run(2, other_mode):
        assert code == "invalid_use", message
        assert "mode" in message
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
