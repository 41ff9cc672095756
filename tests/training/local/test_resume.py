"""Training with local steps goes on from a checkpoint with the same bits, wherever in the round it was saved."""

import functools
import io
import json
import logging

import pytest

from training.attached import attach, heard, not_refused
from training.launch import torchrun
from training.needs import torch
from training.pool import on_ranks

pytest.importorskip("training.needs")
import gradcast
from training.local.reference import net, train
from training.local.test_rounds import adamw


def copied(value):
    """As a file would bring it back."""
    memory = io.BytesIO()
    torch.save(value, memory)
    memory.seek(0)
    return torch.load(memory)


def saved(module, optimizer, handle):
    parts = {"module": module, "optimizer": optimizer, "handle": handle}
    return copied({name: part.state_dict() for name, part in parts.items()})


def begin(state, every=5, wire="fp32", **local):
    module = net(0)
    optimizer = adamw(module)
    handle = attach(module, optimizer, wire=wire, local=gradcast.LocalSteps(every, **local))
    if state is not None:
        module.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimizer"])
        handle.load_state_dict(state["handle"])
    return module, optimizer, handle


def run(module, optimizer, rank, steps):
    for step in steps:
        train(module, optimizer, rank.index, step)


@pytest.mark.parametrize("form", [{"overlap": 3}, {"overlap": 0}, {"overlap": 2, "outer": "average"}])
@on_ranks(2)
def test_in_the_middle_of_a_round(rank, form):
    """Saved after 6 to 10 steps: fragments have arrived, travel, or are not taken yet."""
    whole, optimizer, handle = begin(None, **form)
    states = {}
    for step in range(23):
        train(whole, optimizer, rank.index, step)
        if 5 <= step < 10:
            states[step + 1] = saved(whole, optimizer, handle)
    handle.end_round()
    handle.detach()
    found = []
    for done, state in states.items():
        module, optimizer, handle = begin(state, **form)
        run(module, optimizer, rank, range(done, 23))
        handle.end_round()
        same = all(map(torch.equal, module.state_dict().values(), whole.state_dict().values()))
        found += [] if same else [f"other parameters when resumed after {done} steps"]
        found += [] if handle.stats()["step"] == 23 else ["another number of steps"]
        handle.detach()
    return found


@on_ranks(2)
def test_what_does_not_fit_is_refused_on_all_ranks(rank):
    module, optimizer, handle = begin(None, overlap=2)
    run(module, optimizer, rank, range(7))
    inside = saved(module, optimizer, handle)
    handle.end_round()
    ended = saved(module, optimizer, handle)
    handle.detach()
    found = []
    cases = [
        ({"every": 6}, inside, "saved inside a round with every 5, and here it is 6"),
        ({"overlap": 3}, inside, "overlap"),
        ({"outer": "average"}, ended, "outer momentum"),
    ]
    for options, state, words in cases:
        found += not_refused(functools.partial(begin, state, **{"overlap": 2} | options), words)
    named = {"outer": "nesterov", "lr": 0.7, "momentum": 0.9}  # as left out
    newer = inside["handle"]["settings"]
    before = {"every": "sync_every", "every_max": "sync_every_max", "lr": "outer_lr", "momentum": "outer_momentum"}
    older = {before.get(name, name): each for name, each in newer.items()}
    oldest = older | dict.fromkeys(before.get(name, name) for name in named)
    for settings in (newer, older, oldest):
        state = inside | {"handle": inside["handle"] | {"settings": settings}}
        begin(state, overlap=2, **named)[2].detach(wait_s=1.0)
    # After end_round() there is nothing of the round left, so it may go on in another form.
    module, optimizer, handle = begin(ended, overlap=0, every=3)
    run(module, optimizer, rank, range(7))
    handle.end_round()
    handle.detach()
    return found


@on_ranks(2)
def test_an_older_state_that_counts_on_where_a_round_ends_makes_no_other_round(rank):
    module, optimizer, handle = begin(None, overlap=0)
    run(module, optimizer, rank, range(10))
    state = saved(module, optimizer, handle)
    handle.detach()
    state["handle"]["place"]["clock"] = 10
    del state["handle"]["settings"]["every_max"]
    module, optimizer, handle = begin(state, overlap=0)
    handle.end_round()
    found = [name for name, each in module.state_dict().items() if not torch.equal(each, state["module"][name])]
    handle.detach()
    return found


@on_ranks(2)
def test_states_of_different_steps_or_ranks_are_refused(rank):
    states = []
    module, optimizer, handle = begin(None)
    for step in range(7):
        run(module, optimizer, rank, [step])
        states.append(copied(handle.state_dict()))
    handle.end_round()
    handle.detach()
    found = []
    other = [None, None]
    torch.distributed.all_gather_object(other, states[5])
    for state, words in [(states[4 + rank.index], "different steps"), (other[1], "that of rank 1")]:
        handle = begin(None)[2]
        found += not_refused(functools.partial(handle.load_state_dict, state), words)
        handle.detach()
    return found


@on_ranks(1)
def test_states_of_another_kind_are_refused(rank):
    handle = begin(None)[2]
    found = not_refused(lambda: handle.load_state_dict({"mode": "overlap", "version": 3}), "local steps")
    state = handle.state_dict()
    for lost in ("tensors", "place", "settings"):
        damaged = {name: value for name, value in state.items() if name != lost}
        found += not_refused(functools.partial(handle.load_state_dict, damaged), f"KeyError: '{lost}'")
    handle.detach()
    small = torch.nn.Linear(3, 2)
    other = attach(small, torch.optim.SGD(small.parameters(), 0.1), local=gradcast.LocalSteps(5))
    found += not_refused(lambda: other.load_state_dict(state), "another model")
    other.detach()
    return found


@pytest.mark.slow
def test_a_rank_that_is_killed_inside_a_round_goes_on_after_torchruns_restart(tmp_path):
    """Killed after 15 steps of rounds of 6, when fragments travel."""
    told = []
    for number, killed_step in enumerate((-1, 15)):
        folder = tmp_path / str(number)
        folder.mkdir()
        out = torchrun("-m", "training.local.ends", "restarts", str(folder), str(killed_step))
        told.append(json.loads(out))
    undisturbed, restarted = told
    assert (undisturbed["life"], undisturbed["first"]) == (0, 0)
    assert (restarted["life"], restarted["first"]) == (1, 15)
    assert restarted["digest"] == undisturbed["digest"]


@on_ranks(2)
def test_between_rounds_other_settings_go_on_without_what_rounding_has_left(rank):
    module, optimizer, handle = begin(None, 4, "int8", overlap=2)
    run(module, optimizer, rank, range(6))
    handle.end_round()
    state = saved(module, optimizer, handle)
    handle.detach()
    with heard(logging.WARNING) as lines:
        module, optimizer, handle = begin(state, 8, "int8", overlap=3)
    assert any("earlier differences are dropped" in line for line in lines)
    assert all(torch.equal(each, state["module"][name]) for name, each in module.state_dict().items())
    run(module, optimizer, rank, range(6, 16))
    handle.end_round()
    handle.detach()
