"""Lines of a loop that trains without gradcast, and that would wait early with it. For the doctor.

Thread safety: the training thread.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gradcast.training.measure.early_waits import Cause, counted, line_here
from gradcast.training.step import pending


class EarlyUses(pending.Owner):
    """Watches gradients between backward and ``step()``, and parameters between ``step()`` and forward.

    ``lines``: by line, what it does, what to do instead, and the indices of the parameters that it uses.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._index_of: dict[int, int] = {}  # by id of what is watched
        self.lines: dict[tuple[str, Cause], tuple[str, set[int]]] = {}

    def watch_gradients(self) -> None:
        """Called when backward has ended."""
        self._watch(Cause.GRADIENTS, [parameter.grad for parameter in self._parameters])

    def watch_parameters(self) -> None:
        """Called when ``step()`` has ended."""
        self._watch(Cause.PARAMETERS, self._parameters)

    def _watch(self, cause: Cause, tensors: Sequence[torch.Tensor | None]) -> None:
        self.stop()
        self._cause, self._watched = cause, [tensor for tensor in tensors if tensor is not None]
        self._index_of = {id(tensor): index for index, tensor in enumerate(tensors) if tensor is not None}
        pending.mark(self._watched, self)

    def stop(self) -> None:
        if self._index_of:
            pending.clear(self._watched)
            self._index_of, self._watched = {}, []

    def resolve(self, tensors: list[torch.Tensor]) -> None:
        _, where, advice = line_here(self._cause)
        _, used = self.lines.setdefault((where, self._cause), (advice, set()))
        for tensor in tensors:
            used.add(self._index_of[id(tensor)])
        pending.clear(tensors)

    def described(self) -> list[dict[str, Any]]:
        """``where``, ``what``, ``advice`` of each line, and ``parameters``, the indices."""
        return [
            {
                "where": where,
                "what": counted(cause, len(used), len(self._parameters)),
                "advice": advice,
                "parameters": sorted(used),
            }
            for (where, cause), (advice, used) in self.lines.items()
        ]
