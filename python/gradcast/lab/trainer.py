"""Trains one model in one variant, step by step, and times each step."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradcast
from gradcast.lab.variants import Variant

Batch = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Trainer:
    """A model with its optimizer and, if the variant sends gradients, DDP or gradcast. Collective."""

    def __init__(
        self, variant: Variant, module: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, *, in_flight: int = 1
    ) -> None:
        self.variant = variant
        self.module = module
        self.handle: Any = None  # gradcast's, None without it
        self.step_count = 0
        self._loss = loss
        self._optimizer = optimizer
        self._model = module
        if variant.mode == "ddp":
            # A group of its own has its own connections, as in a separate training: TCP adapts to its messages alone.
            own = dist.new_group()
            self._model = DistributedDataParallel(module, process_group=own, **_bucket_options(variant))
        elif variant.by_gradcast:
            policy = {} if variant.policy is None else {"policy": variant.policy}
            options = gradcast.Options(
                in_flight=variant.in_flight or in_flight, adapt=variant.adapt, wire=variant.wire, **policy
            )
            self.handle = gradcast.attach(module, optimizer if variant.mode == "overlap" else None, options=options)

    def steps(self, batches: Iterable[Batch]) -> Iterator[float]:
        """Trains on each batch and yields its ms. If a step leaves gradients in flight, the next waits for them."""
        start = time.perf_counter()
        for inputs, targets in batches:
            self._optimizer.zero_grad()
            self._loss(self._model(inputs), targets).backward()
            self._optimizer.step()
            self.step_count += 1
            end = time.perf_counter()
            yield 1e3 * (end - start)
            start = end

    def finish(self) -> None:
        """Waits for everything in flight, and frees the gradients."""
        if self.handle:
            self.handle.flush()
        self._optimizer.zero_grad()

    def bucket_count(self) -> int | None:
        """Number of DDP's buckets, None if DDP does not tell or is not used."""
        if not isinstance(self._model, DistributedDataParallel):
            return None
        facts = self._model._get_ddp_logging_data()
        sizes = facts.get("rebuilt_bucket_sizes") or facts.get("bucket_sizes")
        return len(str(sizes).split(",")) if sizes else None

    def detach(self) -> None:
        if self.handle:
            self.handle.detach()


def _bucket_options(variant: Variant) -> dict[str, Any]:
    if len(variant.caps_mib) > 1:
        # Documented as whole numbers, but DDP multiplies them by 2^20 and rounds to bytes, so any number works.
        return {"bucket_cap_mb_list": list(variant.caps_mib)}
    return {"bucket_cap_mb": variant.caps_mib[0]} if variant.caps_mib else {}
