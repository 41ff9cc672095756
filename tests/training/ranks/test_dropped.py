"""Models that the program drops without detach(): their threads, sockets and groups become free, and other ranks still
get what travels."""

import contextlib
import gc
import os
from unittest import mock

import pytest

import gradcast
from training import compare
from training.attached import attach
from training.inside import session_of
from training.needs import torch
from training.pair import Pair, net
from training.pool import on_ranks
from training.threads import threads_named

pytest.importorskip("training.needs")
from gradcast.training.ranks import dropped, group, group_pool

dist = torch.distributed
CPU = torch.device("cpu")


def open_files():
    names = []
    for handle in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            names.append(os.readlink(f"/proc/self/fd/{handle}"))
    return names


def held():
    """What each model has of its own, in the whole process."""
    dropped.end_all(10.0)
    return {
        "engines": len([name for name in threads_named("gradcast") if name == "gradcast"]),
        "gloo": len(threads_named("pt_gloo")),
        "groups": len(group_pool._own_groups),
        "sockets": len([name for name in open_files() if name.startswith("socket:")]),
    }


def has_not_grown(before, after):
    """What earlier tests of this process have left may end meanwhile."""
    return all(after[name] <= before[name] for name in before)


LOCAL = {"local": 2, "local, inside a round": 12}  # steps of a round


def trained(rank, mode, wrap=False):
    is_local = mode in LOCAL
    module = (
        net() if mode != "local, inside a round" else torch.nn.Sequential(*[torch.nn.Linear(6, 6) for _ in range(20)])
    )
    called = torch.nn.parallel.DistributedDataParallel(module) if wrap else module
    options = {"local": gradcast.LocalSteps(LOCAL[mode])} if is_local else {}
    torch.manual_seed(rank.index)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    handle = attach(called, optimizer, "overlap" if is_local else mode, **options)
    for _ in range(5):
        optimizer.zero_grad()
        called(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
    return module, optimizer, handle


@pytest.mark.parametrize(
    ("mode", "wrap"), [("overlap", False), ("overlap", True), ("hook", True), *((mode, False) for mode in LOCAL)]
)
@on_ranks(2)
def test_many_models_end_with_what_one_has(rank, mode, wrap):
    seen = []
    for _ in range(4):
        trained(rank, mode, wrap)
        gc.collect()
        seen.append(held())
    return [] if has_not_grown(seen[0], seen[-1]) and seen[0]["engines"] == 0 else seen


@on_ranks(2)
def test_a_name_that_is_bound_again_holds_two_models_at_most(rank):
    """The collector does not run by itself, so only attach finds what the loop has dropped."""
    gc.disable()
    try:
        seen = []
        for _ in range(6):
            kept = trained(rank, "overlap")
            seen.append(held())
        del kept
    finally:
        gc.enable()
    return [] if has_not_grown(seen[1], seen[-1]) and seen[1]["groups"] == 2 else seen


@on_ranks(2)
def test_other_ranks_get_what_a_dropped_model_owes_them(rank):
    """Rank 0 drops its model while the last step's gradients wait for rank 1."""
    digests = []
    for drops in (False, True):
        module, optimizer, handle = trained(rank, "overlap")
        name = f"rank 0 is ready, {drops}"
        if rank.index == 1:
            rank.wait_for(name)
        optimizer.zero_grad()
        module(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        if rank.index == 0 and drops:
            assert session_of(handle).exchange.busy
            del module, optimizer, handle
            gc.collect()
        if rank.index == 0:
            rank.signal(name)
        if rank.index == 1 or not drops:
            handle.flush()
            digests.append(compare.digest(module))
        rank.gather(f"done {drops}", None)
        module = optimizer = handle = None
    return [] if len(set(digests)) == 1 else digests


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(context, value):
        return value.clone()

    @staticmethod
    def backward(context, gradient):
        raise ZeroDivisionError


@on_ranks(2)
def test_training_begins_again_after_a_backward_pass_that_failed(rank):
    """As when the batch was too large. Half of the gradients never come, and nobody waits long for them."""
    module, optimizer, handle = trained(rank, "overlap")
    with pytest.raises(ZeroDivisionError):
        module[2:](Broken.apply(module[:2](torch.randn(4, 6)))).sum().backward()
    # Gradients of the last layers travel, the others do not exist.
    del module, optimizer, handle
    module, _, _ = trained(rank, "overlap")
    digests = rank.gather("digest", compare.digest(module))
    return [] if digests[0] == digests[1] else digests


@on_ranks(2)
def test_a_group_in_which_ranks_have_sent_differently_much_is_not_used_again(rank):
    """Rank 0's message would be taken for the first one of the next training."""
    state = group_pool.OwnGroup.state

    def sent_more(made):
        name, count = state.fget(made)
        return name, count + rank.index

    first = group.make_group(None, CPU, 20.0, reuses=True).own.group_name
    with mock.patch.object(group_pool.OwnGroup, "state", property(sent_more)):
        second = group.make_group(None, CPU, 20.0, reuses=True).own.group_name
    third = group.make_group(None, CPU, 20.0, reuses=True).own.group_name
    return [] if first != second == third else [first, second, third]


@on_ranks(2)
def test_a_group_that_ranks_drop_at_different_times_is_used_again_later(rank):
    """Rank 1 still has the first one when rank 0 has dropped it."""
    first = group.make_group(None, CPU, 20.0, reuses=True)
    name = first.own.group_name
    kept = first if rank.index == 1 else None
    del first
    second = group.make_group(None, CPU, 20.0, reuses=True)
    assert second.own.group_name != name
    del kept
    third = group.make_group(None, CPU, 20.0, reuses=True)
    return [] if third.own.group_name == name else ["not used again"]


@on_ranks(2)
def test_a_model_is_collected_while_another_one_trains(rank):
    """Wherever Python looks for garbage, which it does all the time here."""
    for _ in range(3):
        trained(rank, "overlap")
    pair = Pair(rank, "plain")
    thresholds = gc.get_threshold()
    gc.set_threshold(7, 2, 2)
    try:
        for _ in range(3):
            trained(rank, "hook")
            pair.train(3)
    finally:
        gc.set_threshold(*thresholds)
    dropped.end_all(10.0)
    names = [name for name in threads_named("gradcast") if name == "gradcast"]
    found = [] if len(names) == 1 else names
    pair.handle.flush()
    return found + compare.modules(pair.ours.module, pair.theirs.module)
