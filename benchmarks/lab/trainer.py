"""One model that is trained in one of the modes, step by step and with the time of each step."""

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

Batch = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Trainer:
    """A model trained in one mode, some steps at a time. With SGD, because Adam enlarges differences of rounding."""

    def __init__(self, mode: str, module: nn.Module, loss: Loss, *, learning_rate: float) -> None:
        self.mode = mode
        self.module = module
        self.handle: Any = None  # of gradcast
        self._loss = loss
        self._optimizer = torch.optim.SGD(module.parameters(), lr=learning_rate, momentum=0.9)
        self._model = module if mode == "alone" else DistributedDataParallel(module)
        if mode in ("hook", "overlap"):
            import gradcast

            self.handle = gradcast.attach(self._model, self._optimizer if mode == "overlap" else None)

    def steps(self, batches: Iterable[Batch]) -> list[float]:
        """Trains on each batch; returns the ms of each step. The last one includes the end of all that is in flight."""
        times = [time.perf_counter()]
        for inputs, targets in batches:
            self._optimizer.zero_grad()
            self._loss(self._model(inputs), targets).backward()
            self._optimizer.step()
            times.append(time.perf_counter())
        if self.handle:
            self.handle.flush()
            times[-1] = time.perf_counter()
        return [1e3 * (end - start) for start, end in itertools.pairwise(times)]

    def detach(self) -> None:
        if self.handle:
            self.handle.detach()
