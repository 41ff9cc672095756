"""The cost of skewed data, measured on each rank, and the number of steps that all ranks choose from it.

Thread safety: training thread.
"""

import contextlib
import logging
import math
import numbers
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from gradcast import local_pace
from gradcast.errors import refused
from gradcast.random_state import random_state, restore_random_state
from gradcast.training.acceptance import Accepted
from gradcast.training.options import LocalSteps
from gradcast.training.ranks.group import Group

_log = logging.getLogger("gradcast")
_TEXT_MAX = 200

Score = float | str  # or what is wrong with it


class Pacing:
    """Measures and chooses. ``measured_step``: the step of the last measurement. ``last``: its result."""

    def __init__(self, accepted: Accepted, local: LocalSteps, group: Group) -> None:
        self._model, self._local = accepted.whole, local
        self._device, self._tells = accepted.device, group.rank == 0
        self.measured_step = 0
        self.last: dict[str, Any] | None = None

    def is_due(self, every: int, step: int) -> bool:
        return local_pace.is_due(every, step - self.measured_step)

    def score(self) -> Score:
        """Returns the result of ``options.local.evaluate`` for the model as it is."""
        with undisturbed(self._model, self._device):
            try:
                found = self._local.evaluate(self._model, self._local.evaluate_batch)
                found = found.item() if isinstance(found, torch.Tensor) and found.numel() == 1 else found
            except Exception as error:
                text = " ".join(str(error).split())[:_TEXT_MAX]
                return f"options.local.evaluate has raised {type(error).__name__} ({text})"
        is_number = isinstance(found, numbers.Real) and not isinstance(found, bool)
        if not is_number or not math.isfinite(found):
            shown = " ".join(repr(found).split())[:_TEXT_MAX]
            return f"options.local.evaluate has returned {shown}, and a finite number is expected"
        if self._local.evaluate_metric == "accuracy" and not 0 <= found <= 1:
            return f"options.local.evaluate has returned {found:g}, and an accuracy from 0 to 1 is expected"
        return float(found)

    def state(self) -> dict[str, Any]:
        return {"measured_step": self.measured_step, "last": self.last}

    def restore(self, state: dict[str, Any]) -> None:
        self.measured_step, self.last = state["measured_step"], state["last"]

    def choose(self, every: int, step: int, everyone: Sequence[tuple[Score, Score]]) -> int:
        """The next number of steps, the same on all ranks. ``everyone``: by rank, the scores of its own model and of
        the global copy. Raises Error(invalid_use), on all ranks, if one of them has none."""
        for rank, scores in enumerate(everyone):
            for score in scores:
                if isinstance(score, str):
                    raise refused(f"{score}, on rank {rank} after {step} steps; correct it there")
        metric, limit = self._local.evaluate_metric, self._local.limit
        own, common = zip(*everyone, strict=True)
        gap = local_pace.gap_of(metric, own, common)
        chosen, why = local_pace.next_every(metric, every, gap, limit)
        self.measured_step, self.last = step, {"step": step, "gap": gap, "why": why}
        if self._tells and chosen != every:
            _log.info("after %d steps %s", step, why)
        return chosen


@contextlib.contextmanager
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Puts the model into evaluation mode without gradients inside. Afterwards modes, buffers, gradients and random
    generators are as before."""
    chances = random_state(device)
    modes = [(each, each.training) for each in model.modules()]
    buffers = [(each._buffers, key, t) for each in model.modules() for key, t in each._buffers.items() if t is not None]
    kept = [tensor.clone() for _, _, tensor in buffers]
    gradients = [(each, each.grad) for each in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, is_training in modes:
            module.train(is_training)  # a module's own may do more than to set the flag
        for module, is_training in modes:
            module.training = is_training
        with torch.no_grad():
            for (held, key, tensor), values in zip(buffers, kept, strict=True):
                held[key] = tensor.copy_(values)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        restore_random_state(chances, device)
