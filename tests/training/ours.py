"""Training with gradcast as the tests do it, and a way to know which plan a step followed."""

from collections.abc import Callable
from typing import NamedTuple

from training import optimizers
from training.attached import attach, planning
from training.models import task_of
from training.needs import torch

nn = torch.nn


class Followed(NamedTuple):
    """What was in force in a backward pass."""

    version: int
    policy: str
    layout: tuple
    blocks: tuple


class Ours:
    """A task under gradcast: module, optimizer and handle. In overlap mode nothing is flushed between steps.

    Every rank starts from parameters of its own: attach must make them rank 0's.
    """

    def __init__(
        self,
        model: str | Callable,
        optimizer_name: str | Callable,
        rank: int,
        *,
        mode: str = "overlap",
        wrap: bool = False,
        ddp_options: dict | None = None,
        **options,
    ) -> None:
        self.task = task_of(model)
        self.rank = rank
        self.bare = self.task.module(seed=rank)
        self.module: nn.Module = self.bare
        if wrap:
            self.module = nn.parallel.DistributedDataParallel(self.bare, **(ddp_options or {}))
        self.recipe = optimizers.make(optimizer_name, self.bare)
        self.optimizer = self.recipe.optimizer
        self.warmup_steps = options.get("plan", planning()).warmup_steps
        self.handle = attach(self.module, self.optimizer, mode, **options)
        self.followed: list[Followed] = []

    def backward(self, batch) -> float:
        loss = self.task.loss(self.module, batch)
        loss.backward()
        plan = self.handle.plan
        self.followed.append(Followed(self.handle.plan_version, plan.policy, self.handle.layout, plan.blocks))
        return loss.item()

    def step(self, number: int) -> float:
        self.optimizer.zero_grad()
        loss = self.backward(self.task.batch(self.rank, number))
        self.optimizer.step()
        self.recipe.after_step()
        return loss

    def train(self, steps: range) -> list[float]:
        return [self.step(number) for number in steps]
