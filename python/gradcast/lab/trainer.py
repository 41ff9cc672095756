"""Trains one model step by step, and times each step."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradcast
from gradcast.lab.models import Batch, Task
from gradcast.lab.variants import Variant


class Training:
    """A model in training. ``called``: its module or wrapper. ``handle``: gradcast's, None without it."""

    def __init__(self, task: Task, called: nn.Module, optimizer: torch.optim.Optimizer, handle: Any = None) -> None:
        self.task, self.called, self.optimizer, self.handle = task, called, optimizer, handle
        self.losses: list[torch.Tensor] = []  # of each step
        self.before_step: Callable[[], Any] = lambda: None  # between backward and step()
        self.after_step: Callable[[], Any] = lambda: None

    @property
    def step_count(self) -> int:
        return len(self.losses)

    def steps(self, batches: Iterable[Batch]) -> Iterator[float]:
        """Trains on each batch and yields its ms. If a step leaves gradients in flight, the next waits for them."""
        start = time.perf_counter()
        for inputs, targets in batches:
            self.optimizer.zero_grad()
            loss = self.task.loss(self.called(inputs), targets)
            loss.backward()
            self.before_step()
            self.optimizer.step()
            self.after_step()
            self.losses.append(loss.detach())
            end = time.perf_counter()
            yield 1e3 * (end - start)
            start = end

    def train(self, count: int) -> list[float]:
        """Trains on the next ``count`` batches of the task, and returns the ms of each."""
        return list(self.steps(self.task.batches(self.step_count, count)))

    def turn(self, count: int) -> list[float]:
        """Trains ``count`` steps together with all ranks, in turns with other models, until nothing is in flight.
        Returns the ms of each step but the first one, which finds caches and TCP's windows as another model left them.
        """
        dist.barrier()
        times_ms = self.train(count)
        self.finish()
        return times_ms[1:]

    def duration_s(self, count: int) -> float:
        """Trains ``count`` steps, and returns their time with all updates."""
        start = time.perf_counter()
        self.train(count)
        self.finish()
        return time.perf_counter() - start

    def finish(self) -> None:
        """Waits for everything in flight, and frees the gradients."""
        if self.handle:
            self.handle.flush()
        self.optimizer.zero_grad()

    def detach(self) -> None:
        if self.handle:
            self.handle.detach()


def attached(task: Task, module: nn.Module | None = None, **options: Any) -> Training:
    """Returns a model of the task, or ``module``, in overlap mode with these options of gradcast. Collective."""
    if module is None:
        module = task.module()
    optimizer = task.optimizer(module)
    handle = gradcast.attach(module, optimizer, options=gradcast.Options(**options))
    return Training(task, module, optimizer, handle)


class Trainer(Training):
    """A model of the task with, if the variant sends gradients, DDP or gradcast. Collective."""

    def __init__(self, variant: Variant, task: Task, *, in_flight: int = 1) -> None:
        self.variant = variant
        self.module = called = task.module()
        optimizer, handle = task.optimizer(self.module), None
        if variant.mode == "ddp":
            called = ddp_alone(self.module, **_bucket_options(variant))
        elif variant.by_gradcast:
            policy: dict[str, Any] = {} if variant.policy is None else {"policy": variant.policy}
            planning = gradcast.Planning(in_flight=variant.in_flight or in_flight, adapt=variant.adapt, **policy)
            options = gradcast.Options(plan=planning, wire=variant.wire)
            handle = gradcast.attach(self.module, optimizer if variant.mode == "overlap" else None, options=options)
        super().__init__(task, called, optimizer, handle)

    def bucket_count(self) -> int | None:
        """Returns the number of DDP's buckets, None if it is unknown or DDP is not used."""
        if not isinstance(self.called, DistributedDataParallel):
            return None
        facts = self.called._get_ddp_logging_data()
        sizes = facts.get("rebuilt_bucket_sizes") or facts.get("bucket_sizes")
        return len(str(sizes).split(",")) if sizes else None


def ddp_alone(module: nn.Module, **options: Any) -> DistributedDataParallel:
    """DDP with connections of its own, as in a separate training: TCP adapts to its messages alone. Collective."""
    return DistributedDataParallel(module, process_group=dist.new_group(), **options)


def _bucket_options(variant: Variant) -> dict[str, Any]:
    if len(variant.caps_mib) > 1:
        # Documented as whole numbers, but DDP multiplies them by 2^20 and rounds to bytes, so any number works.
        return {"bucket_cap_mb_list": list(variant.caps_mib)}
    return {"bucket_cap_mb": variant.caps_mib[0]} if variant.caps_mib else {}
