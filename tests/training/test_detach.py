"""detach() gives everything back: parameters finished, hooks gone, the optimizer's step and DDP as they were."""

import copy
import gc
import os
import weakref
from unittest import mock

import pytest

import gradcast
from training import compare
from training.attached import attach
from training.inside import session_of
from training.models import TASKS
from training.needs import torch
from training.pair import Pair, differences
from training.pool import on_ranks
from training.test_copies import hooks_of, not_ordinary
from training.threads import threads_named

pytest.importorskip("training.needs")
from gradcast.training.ranks import dropped

nn = torch.nn


@pytest.mark.parametrize("wrap", [False, True])
@on_ranks(2)
def test_detach_leaves_nothing_behind(rank, mode, wrap):
    gc.collect()  # what earlier tests have dropped
    others = len(threads_named("gradcast"))
    pair = Pair(rank, "convnet", "adamw plain", mode=mode, wrap=wrap)
    assert len(threads_named("gradcast")) == others + 1
    pair.train(4)
    if mode == "overlap":
        pair.pending_step()
    module, optimizer = pair.ours.module, pair.ours.optimizer
    assert hooks_of(module)
    pair.handle.detach()
    # Read through memory alone: nothing may be pending any more.
    found = compare.modules(module, pair.theirs.module) + compare.optimizers(optimizer, pair.theirs.optimizer)
    assert len(threads_named("gradcast")) == others, "its thread is left"
    assert "gradcast" not in repr(vars(optimizer).get("step", ""))
    return found + not_ordinary(module) + hooks_of(module)


DDP_OPTIONS = (
    {}, {"static_graph": True}, {"static_graph": True, "gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.001},
    {"find_unused_parameters": True}, {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
    {"gradient_as_bucket_view": True}, {"broadcast_buffers": False}, {"init_sync": False}, {"check_reduction": True},
)  # fmt: skip


def ddp_goes_on(side, options, steps_before):
    """DDP reduces again after so many steps with gradcast."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    ddp = nn.parallel.DistributedDataParallel(module, **options)
    side.attach(ddp, optimizer, policy="fifo")
    if steps_before < 0 and side.handle is not None:
        side.handle.detach()
    for number in side.steps(ddp, optimizer):
        if number == steps_before and side.handle is not None:
            side.handle.detach()
    return side.result(module, optimizer)


@pytest.mark.parametrize("steps_before", [-1, 0, 4])
@on_ranks(2)
def test_ddp_with_any_argument_reduces_again(rank, steps_before, mode):
    """Detached before the first step, behind the first backward pass, and in mid-run."""
    found = [(options, differences(rank, ddp_goes_on, mode, options, steps_before)) for options in DDP_OPTIONS]
    return [f"{options}: {wrong[0]}" for options, wrong in found if wrong]


@pytest.mark.parametrize("wrap", [False, True])
@on_ranks(2)
def test_training_goes_on_without_gradcast(rank, wrap):
    """Bare: each rank for itself from then on. Wrapped: DDP reduces again. Schedulers work on both."""
    pair = Pair(rank, "convnet", "adam plain", wrap=wrap)
    pair.train(4)
    pair.pending_step()
    pair.handle.detach()
    schedulers = [torch.optim.lr_scheduler.StepLR(side.optimizer, 2, 0.5) for side in pair.sides]
    for number in range(4):
        for side, scheduler in zip(pair.sides, schedulers, strict=True):
            side.optimizer.zero_grad()
            side.task.loss(side.forward if wrap else side.module, side.batch(40 + number)).backward()
            side.optimizer.step()
            scheduler.step()
    digests = rank.gather("digest", compare.digest(pair.ours.module))
    assert (digests[0] == digests[1]) == wrap
    return compare.modules(pair.ours.module, pair.theirs.module)


@pytest.mark.parametrize(("disabled", "mode"), [("0", "hook"), ("1", "ddp")])
@on_ranks(2)
def test_a_kept_handle_does_not_keep_the_ddp_that_it_has_left(rank, disabled, mode):
    """The handle of the first one is still at hand, as a framework's callback has it."""
    task = TASKS["plain"]
    ours, theirs = (task.module(seed=0) for _ in range(2))
    handles, found = [], []
    with mock.patch.dict(os.environ, GRADCAST_DISABLE=disabled):
        for number in range(2):
            for module in (ours, theirs):
                ddp = torch.nn.parallel.DistributedDataParallel(module)
                handles += [gradcast.attach(ddp)] if module is ours else []
                module.zero_grad()
                task.loss(ddp, task.batch(rank.index, number)).backward()
                handles[-1].detach()
            found += compare.trees(*([p.grad for p in module.parameters()] for module in (ours, theirs)))
    assert [handle.stats()["mode"] for handle in handles] == [mode] * 2
    return found


@pytest.mark.parametrize("flushes", [True, False])
@on_ranks(2)
def test_a_forgotten_module_takes_its_thread_along(rank, flushes):
    """Nobody calls detach: the module, the optimizer and the handle go out of scope, as in a notebook."""
    others = len(threads_named("gradcast"))
    pair = Pair(rank, "plain")
    pair.train(5)
    if flushes:  # else the last step's parameters are still pending
        pair.handle.flush()
    torch.distributed.barrier()
    assert len(threads_named("gradcast")) == others + 1
    del pair
    gc.collect()
    dropped.end_all(10.0)
    return threads_named("gradcast")[others:]


@on_ranks(2)
def test_a_detached_module_is_freed_as_one_without_gradcast(rank, mode):
    """At once, although the handle is kept: the memory of a device would not wait for the garbage collector."""
    module = TASKS["convnet"].module(seed=0)
    optimizer = torch.optim.Adam(module.parameters())
    handle = attach(module, optimizer, mode)
    for number in range(6):
        optimizer.zero_grad()
        TASKS["convnet"].loss(module, TASKS["convnet"].batch(rank.index, number)).backward()
        optimizer.step()
    held = {"module": module, "optimizer": optimizer, "moment": optimizer.state[next(module.parameters())]["exp_avg"]}
    held |= {"parameter": next(module.parameters()), "buffer": session_of(handle).exchange.buffers.flats[0]}
    left = {name: weakref.ref(each) for name, each in held.items()}
    held.clear()
    gc.collect()
    gc.disable()
    try:
        handle.detach()
        del module, optimizer
        found = [name for name, reference in left.items() if reference() is not None]
    finally:
        gc.enable()
    assert handle.stats()["gradient_buffer_bytes"] > 0
    return found


@on_ranks(2)
def test_a_detached_handle_still_tells(rank):
    """What was recorded can be looked at after training, and flush() and detach() have nothing to do."""
    pair = Pair(rank, "plain")
    pair.train(4)
    before = pair.handle.stats()["step"]
    pair.handle.detach()
    pair.handle.detach()
    pair.handle.flush()
    assert isinstance(pair.handle.timeline(), dict)
    return compare.trees(pair.handle.stats()["step"], before)


@on_ranks(2)
def test_a_closure_may_detach(rank, mode):
    """Then the optimizer's own step follows, on the gradients that have arrived."""
    torch.manual_seed(0)
    module, inputs = torch.nn.Linear(4, 2), torch.ones(3, 4)
    plain = copy.deepcopy(module)
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (module, plain))
    handle = attach(module, ours, mode)

    def closure(model, optimizer, detaches):
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        if detaches:
            handle.detach()
        return loss

    for step in range(6):
        ours.step(lambda: closure(module, ours, step == 4))  # noqa: B023
        theirs.step(lambda: closure(plain, theirs, False))
    return [] if all(map(torch.equal, module.parameters(), plain.parameters())) else ["other numbers"]
