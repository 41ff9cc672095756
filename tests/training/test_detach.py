"""detach() gives everything back: parameters finished, hooks gone, the optimizer's step and DDP as they were."""

import contextlib
import gc
from pathlib import Path

import pytest

import gradcast
from training import compare
from training.models import TASKS
from training.needs import torch
from training.test_copies import hooks_of
from training.twins import Twins


def loop_threads():
    """Names of threads of this process that belong to gradcast, as the system knows them."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            names.append(task.joinpath("comm").read_text().strip())
    return [name for name in names if name.startswith("gradcast")]


def detach_while_pending(rank, mode, wrap):
    others = len(loop_threads())
    twins = Twins(rank, "convnet", "adamw plain", mode=mode, wrap=wrap)
    running = len(loop_threads()) - others
    twins.train(4)
    if mode == "overlap":
        twins.pending_step()
    before = hooks_of(twins.ours.bare)
    twins.handle.detach()
    # Read through memory alone: nothing may be pending any more.
    found = compare.modules(twins.ours.bare, twins.theirs.module)
    found += compare.optimizers(twins.ours.optimizer, twins.recipe.optimizer)
    found += [f"{kind} of {name}: {hook}" for name, kind, hook in hooks_of(twins.ours.bare)]
    found += ["its thread is left"] if len(loop_threads()) > others else []
    found += [f"{n} is a {type(p)}" for n, p in twins.ours.bare.named_parameters() if type(p) is not torch.nn.Parameter]
    if "gradcast" in repr(vars(twins.ours.optimizer).get("step", "")):
        found.append(f"the optimizer's step is {twins.ours.optimizer.step}")
    if running != 1 or not before:
        found.append("nothing was there that could be given back")
    return found


@pytest.mark.parametrize(("mode", "wrap"), [("overlap", False), ("overlap", True), ("hook", False), ("hook", True)])
def test_detach_leaves_nothing_behind(ranks, mode, wrap):
    for found in ranks.run(2, detach_while_pending, mode, wrap):
        assert found == []


def train_after_detach(rank, wrap):
    """Bare: each rank for itself from then on. Wrapped: DDP reduces again. Schedulers work on both."""
    twins = Twins(rank, "convnet", "adam plain", wrap=wrap)
    twins.train(4)
    twins.pending_step()
    twins.handle.detach()
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for _, optimizer, _ in twins.each()]
    for number in range(4):
        for (module, optimizer, forward), scheduler in zip(twins.each(), schedulers, strict=True):
            optimizer.zero_grad()
            twins.task.loss(forward if wrap else module, twins.task.batch(rank.index, 40 + number)).backward()
            optimizer.step()
            scheduler.step()
    found = compare.modules(twins.ours.bare, twins.theirs.module)
    digests = rank.gather("digest", compare.digest(twins.ours.bare))
    if (digests[0] == digests[1]) != wrap:
        found.append("the ranks are equal where they should not be, or the other way round")
    return found


@pytest.mark.parametrize("wrap", [False, True])
def test_training_goes_on_without_gradcast(ranks, wrap):
    for found in ranks.run(2, train_after_detach, wrap):
        assert found == []


def attach_again(rank):
    twins = Twins(rank, "transformer", "adam plain")
    twins.train(4)
    twins.pending_step()
    twins.handle.detach()
    twins.ours.handle = gradcast.attach(
        twins.ours.module, twins.ours.optimizer, options=gradcast.Options(adapt=False, warmup_steps=3)
    )
    twins.train(4)
    twins.pending_step()
    found = twins.end()
    twins.handle.detach()
    return found


def test_attach_after_detach_and_detach_twice(ranks):
    for found in ranks.run(2, attach_again):
        assert found == []


def attach_to_another_ddp(rank, disabled):
    """The handle of the first one is still at hand, as a framework's callback has it."""
    task = TASKS["plain"]
    ours, theirs = (task.module(seed=0) for _ in range(2))
    handles = []

    def train(module, number, attaches):
        ddp = torch.nn.parallel.DistributedDataParallel(module)
        if attaches:
            handles.append(gradcast.attach(ddp))
        module.zero_grad()
        task.loss(ddp, task.batch(rank.index, number)).backward()
        if attaches:
            handles[-1].detach()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADCAST_DISABLE", disabled)
        found = []
        for number in range(2):
            train(ours, number, attaches=True)
            train(theirs, number, attaches=False)
            gradients = ([p.grad for p in module.parameters()] for module in (ours, theirs))
            found += compare.trees(*gradients)
    return found, [handle.stats()["mode"] for handle in handles]


@pytest.mark.parametrize(("disabled", "mode"), [("0", "hook"), ("1", "ddp")])
def test_a_kept_handle_does_not_keep_the_ddp_that_it_has_left(ranks, disabled, mode):
    for found, modes in ranks.run(2, attach_to_another_ddp, disabled):
        assert found == []
        assert modes == [mode] * 2


def forget(rank, flushes):
    """Nobody calls detach: the module, the optimizer and the handle go out of scope, as in a notebook."""
    others = len(loop_threads())
    twins = Twins(rank, "plain")
    twins.train(5)
    if flushes:  # else the last step's parameters are still pending
        twins.handle.flush()
    torch.distributed.barrier()
    during = len(loop_threads())
    del twins
    gc.collect()
    return during - others, len(loop_threads()) - others


@pytest.mark.parametrize("flushes", [True, False])
def test_a_forgotten_module_takes_its_thread_along(ranks, flushes):
    for during, left in ranks.run(2, forget, flushes):
        assert during == 1
        assert left == 0


def finished_handle(rank):
    twins = Twins(rank, "plain")
    twins.train(4)
    stats = twins.handle.stats()
    twins.handle.detach()
    twins.handle.flush()
    return stats["step"], twins.handle.stats()["step"], type(twins.handle.timeline()).__name__


def test_a_detached_handle_still_tells(ranks):
    """What was recorded can be looked at after training, and flush() has nothing to do."""
    for before, after, timeline in ranks.run(2, finished_handle):
        assert before == after
        assert timeline == "dict"
