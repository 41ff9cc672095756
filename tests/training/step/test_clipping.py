"""options.clip: torch's clipping, inside of a step that is carried out later, bit for bit on two ranks."""

import contextlib
import functools
from unittest import mock

import pytest

import gradcast
from gradcast.training.compat import later_read
from gradcast.training.plan import proposals
from gradcast.training.plan.candidates import choose_plan
from gradcast.training.step.clip_certificate import ClipCertificate
from training import compare, optimizers
from training.attached import attach, not_refused
from training.models import TASKS
from training.needs import torch
from training.pair import Pair
from training.pool import on_ranks

nn = torch.nn
MAX_NORM = 0.05


def clip(module, max_norm=MAX_NORM):
    return torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)


def trained(rank, task, optimizer, arguments=lambda number: (), change=lambda *_: None, max_norm=MAX_NORM, **options):
    """How gradcast with clipping inside differs from DDP with torch's. ``arguments``: of forward, by step; ``change``:
    what the user does to gradients before they are clipped."""
    pair = Pair(rank, task, optimizer, clip=gradcast.Clip(norm=max_norm), **options)
    found = []
    for number, side in pair.rounds(12):
        side.optimizer.zero_grad()
        side.loss(*arguments(number)).backward()
        change(number, side.module)
        if side is pair.theirs:
            norm = clip(side.module, max_norm)
        side.optimizer.step()
        if side is pair.ours and number % 4 == 3:
            found += pair.differences()
            found += compare.trees(pair.handle.stats()["grad_norm"], norm.item(), "norm")
    assert pair.handle.stats()["update_calls"] == 1, "the step was not taken at once, but in one part, later"
    return found


@pytest.mark.parametrize("max_norm", [0.05, 1e6], ids=["clips", "does not clip"])
@pytest.mark.parametrize(
    ("task", "optimizer"), [("plain", "adam plain"), ("mixed64", "adamw fused"), ("odd", "sgd foreach")]
)
@on_ranks(2)
def test_it_equals_torch(rank, task, optimizer, max_norm):
    return trained(rank, task, optimizer, max_norm=max_norm)


@pytest.mark.parametrize("how", ["replaced", "removed"])
@on_ranks(2)
def test_gradients_that_the_user_replaces(rank, how):
    """The user puts another gradient into the place of one that has arrived, or takes it away."""

    def change(number, module):
        if number % 2:
            module[2].weight.grad = module[2].weight.grad * 3 if how == "replaced" else None

    return trained(rank, "plain", "adam plain", change=change)


def with_scaler(rank, unscale):
    pair = Pair(rank, "plain", "sgd fused", clip=gradcast.Clip(norm=MAX_NORM))
    scalers = {side: torch.amp.GradScaler("cpu", init_scale=1024.0) for side in pair.sides}
    for _, side in pair.rounds(8):
        side.optimizer.zero_grad()
        scalers[side].scale(side.loss()).backward()
        if unscale:
            scalers[side].unscale_(side.optimizer)
        if side is pair.theirs:
            clip(side.module)
        scalers[side].step(side.optimizer)
        scalers[side].update()
    return pair.differences()


@on_ranks(2)
def test_with_a_scaler(rank):
    return with_scaler(rank, unscale=True)


@on_ranks(2)
def test_scaled_gradients_are_not_clipped(rank):
    """A fused optimizer unscales inside of its step, after the norm would have been taken."""
    return not_refused(lambda: with_scaler(rank, unscale=False), "unscale_")


@on_ranks(2)
def test_hook_mode_refuses_it(rank):
    found = []
    for name in ("norm", "value"):
        call = functools.partial(attach, nn.Linear(2, 2), None, "hook", clip=gradcast.Clip(**{name: 1.0}))
        found += not_refused(call, f"clip_grad_{name}_")
    return found


def one_of_two(rank, world_size, max_norm):
    """One optimizer leaves steps out, and its gradients are zeroed before the other's update has run. With one worker
    nothing is sent."""
    task = TASKS["plain"]
    sides = [(module, optimizers.two_halves(module)) for module in (task.module(), task.module())]
    handle = attach(*sides[1], policy="fifo", clip=gradcast.Clip(norm=max_norm))
    theirs = nn.parallel.DistributedDataParallel(sides[0][0]) if world_size > 1 else sides[0][0]
    for number in range(10):
        for forward, (module, both) in zip((theirs, sides[1][0]), sides, strict=True):
            for optimizer in both:
                optimizer.zero_grad(set_to_none=False)
            task.loss(forward, task.batch(rank.index, number)).backward()
            if forward is theirs:
                clip(module, max_norm)
            both[0].step()
            if number % 3 != 1:
                both[1].step()
            both[1].zero_grad(set_to_none=False)
    if world_size > 1:
        assert (handle.stats()["clipping"]["certified_share"] > 0) == (max_norm > 1)
    handle.detach()
    assert not any("step" in vars(optimizer) for optimizer in sides[1][1]), "detach gives the step back"
    return compare.modules(sides[1][0], sides[0][0])


@pytest.mark.parametrize(("world_size", "max_norm"), [(1, MAX_NORM), (2, MAX_NORM), (2, 1e6)])
def test_optimizers_of_which_one_leaves_steps_out(ranks, world_size, max_norm):
    """Without clipping, steps of both are certified."""
    assert not any(ranks.run(world_size, one_of_two, world_size, max_norm))


@pytest.mark.parametrize("known", ["at once", "later"])
@on_ranks(2)
def test_a_certificate_that_was_wrong_is_an_error(rank, known):
    """On a device that is known in the next certified step, or where the step is flushed."""
    beside = {"_is_on_device": lambda _: True, "_begin_copy": lambda values: (values.clone(), mock.Mock())}
    late = mock.patch.multiple(later_read, **beside) if known == "later" else contextlib.nullcontext()
    module = nn.Linear(4, 4)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    # On a busy machine a plan that waits for all gradients may be measured as the better one.
    overlaps = mock.patch.object(
        proposals, "best_for_steps", lambda profile, modes, _, options, *__: choose_plan(profile, modes[0], options)
    )
    with late, overlaps, mock.patch.object(ClipCertificate, "hold", return_value=torch.tensor(True)):
        handle = attach(module, sgd, clip=gradcast.Clip(norm=1e-3))
        for _ in range(4):  # steps 0 to 2 measure
            sgd.zero_grad()
            module(torch.ones(2, 4)).sum().backward()
            sgd.step()
        with pytest.raises(gradcast.Error, match="in step 3 gradcast certified that the gradients need no clipping"):
            handle.flush()
        handle.detach()
