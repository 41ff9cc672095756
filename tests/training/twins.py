"""Two trainings side by side on two ranks, one with gradcast and one with stock DDP, equal bit for bit at each step.

``pending_step`` leaves the gradcast side with a step that cannot have finished: rank 1's gradients come once rank 0
has looked. Whoever reads a parameter then sees a stale value, unless gradcast makes it wait.
"""

import ctypes
from collections.abc import Callable, Iterator

from training import compare, optimizers
from training.needs import torch
from training.ours import Ours

nn = torch.nn


class Twins:
    """``model``: a task's name, or a function that makes a module for the plain task."""

    def __init__(self, rank, model="plain", optimizer="adam plain", *, find_unused=False, **options) -> None:
        self.rank = rank
        self.ours = Ours(model, optimizer, rank.index, **options)
        self.task = self.ours.task
        self._bare = self.task.module(seed=rank.index)
        self._ddp_options = {"find_unused_parameters": find_unused}
        self.wrap()
        self.recipe = optimizers.make(optimizer, self._bare)
        self.steps = 0
        self.signals = 0

    def wrap(self) -> None:
        """DDP needs a new wrapper where the parameters have changed."""
        self.theirs = nn.parallel.DistributedDataParallel(self._bare, **self._ddp_options)

    @property
    def handle(self):
        return self.ours.handle

    @property
    def modules(self) -> tuple[nn.Module, nn.Module]:
        """DDP's, then gradcast's."""
        return self._bare, self.ours.bare

    def batch(self):
        return self.task.batch(self.rank.index, self.steps)

    def each(self) -> tuple[tuple[nn.Module, torch.optim.Optimizer, nn.Module], ...]:
        """(module, optimizer, module that runs forward) of DDP's side, then of gradcast's."""
        return (
            (self._bare, self.recipe.optimizer, self.theirs),
            (self.ours.bare, self.ours.optimizer, self.ours.module),
        )

    def rounds(self, count: int) -> Iterator[tuple[int, nn.Module, torch.optim.Optimizer, nn.Module]]:
        """The number of each step, with ``each``: who loops over this takes that step on one side."""
        for number in range(count):
            for side in self.each():
                yield number, *side
            self.after_step()

    def no_sync(self, module: nn.Module):
        """The ``no_sync`` of the side that this bare module belongs to."""
        return self.theirs.no_sync() if module is self._bare else self.handle.no_sync()

    def step(self, *arguments, between: Callable | None = None, set_to_none=True) -> None:
        """One step on both sides; ``between(module, optimizer)`` runs after backward. ``arguments``: of forward."""
        for _, module, optimizer, forward in self.rounds(1):
            optimizer.zero_grad(set_to_none=set_to_none)
            self.task.loss(forward, self.batch(), *arguments).backward()
            if between is not None:
                between(module, optimizer)
            optimizer.step()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def after_step(self) -> None:
        self.recipe.after_step()
        self.ours.recipe.after_step()
        self.steps += 1

    def pending_step(self) -> None:
        """One step on both sides; that of gradcast cannot have finished, unless it is of the warm-up, which waits."""
        # The ranks agree on the plan at the first step after the warm-up.
        if self.steps <= self.ours.warmup_steps:
            self.step()
            return
        self.recipe.optimizer.zero_grad()
        self.task.loss(self.theirs, self.batch()).backward()
        self.recipe.optimizer.step()
        self.ours.optimizer.zero_grad()
        loss = self.task.loss(self.ours.module, self.batch())
        # The one way to look that cannot be made to wait, nor is seen: addresses taken while values are finished.
        places = [(parameter.data_ptr(), parameter.nbytes) for parameter in self.ours.bare.parameters()]
        before = [ctypes.string_at(*place) for place in places]
        self.signals += 1
        if self.rank.index != 0:
            self.rank.wait_for(f"looked{self.signals}")
        loss.backward()
        self.ours.optimizer.step()
        if self.rank.index == 0:
            moved = sum(ctypes.string_at(*place) != old for place, old in zip(places, before, strict=True))
            assert moved == 0, f"{moved} parameters were updated without the other rank's gradients"
            self.rank.signal(f"looked{self.signals}")
        self.after_step()

    def differences(self) -> list[str]:
        """What differs between the twins after a flush."""
        assert self.rank.size == 2, "with more ranks the twins differ by rounding"
        self.handle.flush()
        gradients = ({name: p.grad for name, p in module.named_parameters()} for module in reversed(self.modules))
        found = compare.modules(self.ours.bare, self._bare) + compare.trees(*gradients, "gradient")
        return found + compare.optimizers(self.ours.optimizer, self.recipe.optimizer)

    def end(self) -> list[str]:
        """The differences after the last step; gradcast is detached."""
        found = self.differences()
        self.handle.detach()
        return found
