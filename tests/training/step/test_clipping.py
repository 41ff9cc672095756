"""options.max_grad_norm: torch's clipping, inside of a step that is carried out later, bit for bit on two ranks."""

import pytest

import gradcast
from training import compare, optimizers
from training.attached import error_of
from training.models import TASKS
from training.needs import torch
from training.pool import on_ranks
from training.step.test_graph_changes import USES, Branches
from training.twins import Twins

nn = torch.nn
MAX_NORM = 0.05


def clip(module):
    return torch.nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)


def clipped(rank, task, optimizer, max_norm):
    twins = Twins(rank, task, optimizer, max_grad_norm=max_norm)
    norms, found = [], []
    for number, module, step, forward in twins.rounds(10):
        step.zero_grad()
        twins.task.loss(forward, twins.batch()).backward()
        if module is twins.theirs.module:
            norm = torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        step.step()
        if number % 4 == 3:
            twins.handle.flush()
            norms.append((norm.item(), twins.handle.stats()["grad_norm"]))
            found += compare.trees(
                {name: p.grad for name, p in twins.ours.bare.named_parameters()},
                {name: p.grad for name, p in twins.theirs.module.named_parameters()},
                "grad",
            )
    return found + twins.differences(), norms, twins.handle.stats()["update_calls"]


@pytest.mark.parametrize("max_norm", [0.05, 1e6], ids=["clips", "does not clip"])
@pytest.mark.parametrize(
    ("task", "optimizer"), [("plain", "adam plain"), ("mixed64", "adamw fused"), ("odd", "sgd foreach")]
)
def test_it_equals_torch(ranks, task, optimizer, max_norm):
    for found, norms, update_calls in ranks.run(2, clipped, task, optimizer, max_norm):
        assert found == []
        assert norms
        assert all(ours == theirs for theirs, ours in norms)
        assert update_calls == 1, "the step was not taken at once, but in one part, later"


@on_ranks(2)
def test_with_parameters_that_a_step_does_not_use(rank):
    """The norm leaves out what nobody has used."""
    torch.manual_seed(0)
    theirs = Branches()
    torch.manual_seed(0)
    ours = Branches()
    recipes = [optimizers.make("adamw foreach", module) for module in (theirs, ours)]
    ddp = nn.parallel.DistributedDataParallel(theirs, find_unused_parameters=True)
    gradcast_options = gradcast.Options(adapt=False, warmup_steps=3, max_grad_norm=MAX_NORM)
    handle = gradcast.attach(ours, recipes[1].optimizer, options=gradcast_options)
    for number in range(18):
        inputs, targets = TASKS["plain"].batch(rank.index, number)
        for forward, recipe in ((ddp, recipes[0]), (ours, recipes[1])):
            recipe.optimizer.zero_grad()
            output = forward(inputs, USES[number % len(USES)][rank.index])
            nn.functional.cross_entropy(output, targets).backward()
            if forward is ddp:
                clip(theirs)
            recipe.optimizer.step()
    handle.flush()
    return compare.modules(ours, theirs) + compare.optimizers(recipes[1].optimizer, recipes[0].optimizer)


def clipped_with_scaler(rank, unscale):
    twins = Twins(rank, "plain", "sgd fused", max_grad_norm=MAX_NORM)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    for _ in range(8):
        for (module, optimizer, forward), scaler in zip(twins.each(), scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(twins.task.loss(forward, twins.batch())).backward()
            if unscale:
                scaler.unscale_(optimizer)
            if module is twins.theirs.module:
                clip(module)
            scaler.step(optimizer)
            scaler.update()
        twins.after_step()
    return twins.differences()


def test_with_a_scaler(ranks):
    for found in ranks.run(2, clipped_with_scaler, True):
        assert found == []


def scaler_that_scales_inside(rank):
    return error_of(lambda: clipped_with_scaler(rank, False))


def test_scaled_gradients_are_not_clipped(ranks):
    """A fused optimizer unscales inside of its step, after the norm would have been taken."""
    for code, message in ranks.run(2, scaler_that_scales_inside):
        assert code == "invalid_use"
        assert "unscale_" in message


def alone(rank):
    """One worker: nothing is sent, and clipping stays."""
    task = TASKS["plain"]
    theirs, ours = task.module(), task.module()
    adams = [torch.optim.Adam(module.parameters(), lr=1e-2) for module in (theirs, ours)]
    handle = gradcast.attach(
        ours, adams[1], options=gradcast.Options(adapt=False, warmup_steps=3, max_grad_norm=MAX_NORM)
    )
    for number in range(8):
        for module, adam in ((theirs, adams[0]), (ours, adams[1])):
            adam.zero_grad()
            task.loss(module, task.batch(0, number)).backward()
            if module is theirs:
                clip(module)
            adam.step()
    found = compare.modules(ours, theirs)
    handle.detach()
    return found, "step" in vars(adams[1])


def test_one_worker(ranks):
    for found, intercepted in ranks.run(1, alone):
        assert found == []
        assert not intercepted, "detach gives the step back"


def in_hook_mode(rank):
    return error_of(lambda: gradcast.attach(nn.Linear(2, 2), options=gradcast.Options(max_grad_norm=1.0)))


def test_hook_mode_refuses_it(ranks):
    for code, message in ranks.run(2, in_hook_mode):
        assert code == "invalid_use"
        assert "clip_grad_norm_" in message


def replaced(rank, how):
    """The user puts other gradients into the place of some that have arrived, or takes one away."""
    twins = Twins(rank, "plain", "adam plain", max_grad_norm=MAX_NORM)
    for number, module, optimizer, forward in twins.rounds(9):
        optimizer.zero_grad()
        twins.task.loss(forward, twins.batch()).backward()
        if number % 2:
            weight = module[2].weight
            weight.grad = weight.grad * 3 if how == "replaced" else None
        if module is twins.theirs.module:
            clip(module)
        optimizer.step()
    return twins.differences()


@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_gradients_that_the_user_replaces(ranks, how):
    for found in ranks.run(2, replaced, how):
        assert found == []


def one_of_two(rank, world_size):
    """Two optimizers; one leaves steps out, and its gradients are zeroed before the other's update has run."""
    task = TASKS["plain"]
    sides = [(module, optimizers.two_halves(module)) for module in (task.module(), task.module())]
    options = gradcast.Options(adapt=False, warmup_steps=3, policy="fifo", max_grad_norm=MAX_NORM)
    handle = gradcast.attach(*sides[1], options=options)
    theirs = nn.parallel.DistributedDataParallel(sides[0][0]) if world_size > 1 else sides[0][0]
    for number in range(10):
        inputs, targets = task.batch(rank.index, number)
        for forward, (module, both) in zip((theirs, sides[1][0]), sides, strict=True):
            for optimizer in both:
                optimizer.zero_grad(set_to_none=False)
            nn.functional.cross_entropy(forward(inputs), targets).backward()
            if forward is theirs:
                clip(module)
            both[0].step()
            if number % 3 != 1:
                both[1].step()
            both[1].zero_grad(set_to_none=False)
    handle.flush()
    return compare.modules(sides[1][0], sides[0][0])


@pytest.mark.parametrize("world_size", [1, 2])
def test_optimizers_of_which_one_leaves_steps_out(ranks, world_size):
    for found in ranks.run(world_size, one_of_two, world_size):
        assert found == []
