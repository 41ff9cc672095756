"""Features of torch that change how backward, forward or the module run, with DDP's result bit for bit."""

import logging

import pytest

import gradcast
from training import compare, optimizers
from training.attached import error_of
from training.models import TASKS
from training.needs import torch
from training.twins import Twins

nn = torch.nn
checkpoint = pytest.importorskip("torch.utils.checkpoint")


class Checkpointed(nn.Module):
    """Forward of the middle runs again inside backward."""

    def __init__(self, reentrant):
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.middle = nn.Sequential(nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh())
        self.last = nn.Linear(12, 10)
        self.reentrant = reentrant

    def forward(self, x):
        x = checkpoint.checkpoint(self.middle, self.first(x), use_reentrant=self.reentrant)
        return self.last(x)


class Sides:
    """Like Twins, for modules that are made by the test."""

    def __init__(self, rank, make, mode="overlap", optimizer="adam plain"):
        self.rank = rank
        torch.manual_seed(rank.index)
        self.ours = make()
        torch.manual_seed(rank.index)
        self.theirs = make()
        self.ddp = nn.parallel.DistributedDataParallel(self.theirs)
        self.recipes = [optimizers.make(optimizer, module) for module in (self.theirs, self.ours)]
        self.handle = gradcast.attach(
            self.ours,
            self.recipes[1].optimizer if mode == "overlap" else None,
            options=gradcast.Options(adapt=False, warmup_steps=3, policy="fifo"),
        )

    def train(self, steps, forward=lambda module, inputs: module(inputs)):
        task = TASKS["plain"]
        for number in range(steps):
            inputs, targets = task.batch(self.rank.index, number)
            for module, recipe in zip((self.ddp, self.ours), self.recipes, strict=True):
                recipe.optimizer.zero_grad()
                nn.functional.cross_entropy(forward(module, inputs).float(), targets).backward()
                recipe.optimizer.step()
                recipe.after_step()

    def differences(self):
        self.handle.flush()
        found = compare.modules(self.ours, self.theirs)
        found += compare.optimizers(self.recipes[1].optimizer, self.recipes[0].optimizer)
        self.handle.detach()
        return found


def recompute(rank, reentrant, mode):
    sides = Sides(rank, lambda: Checkpointed(reentrant), mode)
    sides.train(8)
    return sides.differences()


@pytest.mark.parametrize("mode", ["overlap", "hook"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(ranks, reentrant, mode):
    for found in ranks.run(2, recompute, reentrant, mode):
        assert found == []


def autocast(rank, optimizer):
    def forward(module, inputs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module(inputs)

    sides = Sides(rank, TASKS["plain"].make, optimizer=optimizer)
    sides.train(8, forward)
    return sides.differences()


@pytest.mark.parametrize("optimizer", ["adam foreach", "adamw fused"])
def test_autocast(ranks, optimizer):
    """Updates run inside of the forward pass, so inside of its autocast; they must not be cast."""
    for found in ranks.run(2, autocast, optimizer):
        assert found == []


def compiled(rank, what, mode):
    torch._dynamo.reset()
    sides = Sides(rank, TASKS["plain"].make, mode)
    for module in (sides.theirs, sides.ours):
        if what == "functions":
            module[2].forward = torch.compile(module[2].forward, backend="aot_eager")
        elif what == "wrapped":
            module[2] = torch.compile(module[2], backend="aot_eager")
        else:
            for part in [module] if what == "module" else [module[0], module[4]]:
                part.compile(backend="aot_eager")
    sides.train(7)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    sides.train(5)
    return sides.differences(), torch._dynamo.utils.counters["stats"]["unique_graphs"] - before


@pytest.mark.parametrize("mode", ["overlap", "hook"])
@pytest.mark.parametrize("what", ["module", "layers", "wrapped", "functions"])
def test_compiled_modules(ranks, what, mode):
    """In the course of training nothing is compiled again: compiled code never sees a pending parameter."""
    for found, compilations in ranks.run(2, compiled, what, mode, timeout_s=120):
        assert found == []
        assert what == "functions" or compilations == 0


def warnings_of_compiling(rank, what):
    said = []
    logger = logging.getLogger("gradcast")
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    try:
        assert compiled(rank, what, "overlap")[0] == []
    finally:
        logger.removeHandler(handler)
    return [line for line in said if "compiled as a whole" in line]


@pytest.mark.parametrize(("what", "lines"), [("module", 1), ("layers", 0)])
def test_that_a_whole_model_keeps_forward_waiting_is_said_once(ranks, what, lines):
    first, second = ranks.run(2, warnings_of_compiling, what, timeout_s=120)
    assert (len(first), len(second)) == (lines, 0)


class Twice(nn.Module):
    """A checkpointed part that is used twice."""

    def __init__(self, reentrant):
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.middle = nn.Sequential(nn.Tanh(), nn.Linear(12, 12))
        self.last = nn.Linear(12, 10)
        self.reentrant = reentrant

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint.checkpoint(self.middle, x, use_reentrant=self.reentrant)
        return self.last(x)


def recompute_twice(rank, reentrant, mode):
    sides = Sides(rank, lambda: Twice(reentrant), mode)
    sides.train(8)
    return sides.differences()


@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_a_checkpointed_part_that_is_used_twice(ranks, mode):
    for found in ranks.run(2, recompute_twice, False, mode):
        assert found == []


def recompute_twice_reentrant(rank, mode):
    """DDP refuses this, so there is no other side."""
    torch.manual_seed(0)
    module = Twice(True)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    gradcast.attach(module, sgd if mode == "overlap" else None, options=gradcast.Options(adapt=False, warmup_steps=3))
    inputs, targets = TASKS["plain"].batch(rank.index, 0)
    return error_of(nn.functional.cross_entropy(module(inputs.requires_grad_()), targets).backward)


@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_a_part_used_twice_under_reentrant_checkpointing_is_refused(ranks, mode):
    for code, message in ranks.run(2, recompute_twice_reentrant, mode):
        assert code == "invalid_use"
        assert "middle.1" in message
        assert "use_reentrant=False" in message


def lbfgs(rank):
    """In hook mode, where every evaluation of its closure is reduced."""
    sides = []
    for _ in range(2):
        torch.manual_seed(0)
        sides.append(TASKS["plain"].make())
    forwards = (nn.parallel.DistributedDataParallel(sides[0]), sides[1])
    optimizers_ = [torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=4) for module in sides]
    handle = gradcast.attach(sides[1], options=gradcast.Options(adapt=False, warmup_steps=3, policy="fifo"))
    for number in range(4):
        inputs, targets = TASKS["plain"].batch(rank.index, number)
        for forward, optimizer in zip(forwards, optimizers_, strict=True):

            def closure(forward=forward, optimizer=optimizer, inputs=inputs, targets=targets):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(forward(inputs), targets)
                loss.backward()
                torch.distributed.all_reduce(loss.detach())  # the ranks have to agree on where to stop
                return loss

            optimizer.step(closure)
    plan = handle.plan.policy
    handle.detach()
    return compare.modules(sides[1], sides[0]), plan


def test_lbfgs_in_hook_mode(ranks):
    for found, plan in ranks.run(2, lbfgs):
        assert found == []
        assert plan == "fifo", "more evaluations than the warm-up has"


def frozen(rank, mode):
    def make():
        module = TASKS["plain"].make()
        module[0].requires_grad_(False)
        module[4].bias.requires_grad_(False)
        return module

    sides = Sides(rank, make, mode)
    sides.train(8)
    return sides.differences()


@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_frozen_parameters(ranks, mode):
    for found in ranks.run(2, frozen, mode):
        assert found == []


def skip_steps(rank, mode, set_to_none):
    """The loop leaves some steps out after backward, as it does for a loss that is no number."""
    twins = Twins(rank, "plain", "adam plain", mode=mode)
    for number in range(10):
        for _, optimizer, forward in twins.each():
            optimizer.zero_grad(set_to_none=set_to_none)
            twins.task.loss(forward, twins.task.batch(rank.index, number)).backward()
            if number % 3 != 1:
                optimizer.step()
        twins._after_step()
    found = twins.differences()
    twins.handle.detach()
    return found


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_steps_that_are_left_out(ranks, mode, set_to_none):
    for found in ranks.run(2, skip_steps, mode, set_to_none):
        assert found == []


def step_twice(rank):
    """Two steps with the same gradients."""
    twins = Twins(rank, "plain", "sgd foreach")
    for number in range(8):
        for _, optimizer, forward in twins.each():
            optimizer.zero_grad()
            twins.task.loss(forward, twins.task.batch(rank.index, number)).backward()
            optimizer.step()
            optimizer.step()
        twins._after_step()
    found = twins.differences()
    twins.handle.detach()
    return found


def test_two_steps_with_the_same_gradients(ranks):
    for found in ranks.run(2, step_twice):
        assert found == []
