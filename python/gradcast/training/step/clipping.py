"""Clipping by the norm of all gradients, inside of a step that is carried out later: torch's numbers.

Every rank holds the same averaged gradients, so no rank has to ask another one. The norms of gradients that have
arrived are taken while others are still travelling; the first update needs all of them, so nothing is hidden behind
forward itself, only behind what comes before it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from gradcast.training.compat.module_hooks import UncopiedHook
from gradcast.training.step.parameter_state import ParameterState


class ClipOnce:
    """torch's own clipping, before the first of several optimizers takes the gradients of a step."""

    def __init__(self, module: nn.Module, max_norm: float) -> None:
        self._module, self._max_norm = module, max_norm
        self._due = True
        # The next step's gradients come after a forward pass.
        self._hook = module.register_forward_pre_hook(UncopiedHook(self._on_forward))

    def remove(self) -> None:
        self._hook.remove()

    def before_step(self) -> None:
        if self._due:
            nn.utils.clip_grad_norm_(self._module.parameters(), self._max_norm)
        self._due = False

    def _on_forward(self, _inputs: Any, _compiled: bool) -> None:
        self._due = True


class NormClipping:
    """``torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)``, piece by piece."""

    def __init__(self, slots: Sequence[ParameterState], max_norm: float) -> None:
        self._slots = list(slots)
        self._max_norm = max_norm
        self._norms: dict[int, torch.Tensor] = {}
        self.total_norm: torch.Tensor | None = None  # of the last clipped step, before clipping
        self.done = False

    def begin(self) -> None:
        """New gradients travel."""
        self._norms.clear()
        self.done = False

    def take(self, slots: Sequence[ParameterState]) -> None:
        """The norms of these, whose gradients have arrived but may still be pending."""
        # A rank cannot know yet whether anybody has used what it has not.
        missing = [slot for slot in slots if slot.index not in self._norms and slot.absence is None]
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            norms = _norms([slot.gradient.detach() for slot in missing])
        self._norms |= {slot.index: norm for slot, norm in zip(missing, norms, strict=True)}

    def apply_to_replaced(self) -> None:
        """Where the user has put other gradients into the place of those that have arrived."""
        self.done = True
        self.total_norm = nn.utils.clip_grad_norm_([slot.parameter for slot in self._slots], self._max_norm)

    def apply(self) -> None:
        """Clips all gradients. REQUIRES: all have arrived and been settled."""
        used = [slot for slot in self._slots if slot.gradient is not None]
        self.take(used)
        self.done = True
        if not used:
            return
        gradients = [slot.gradient for slot in used]
        norms = [self._norms[slot.index] for slot in _by_type(used)]
        self.total_norm = torch.linalg.vector_norm(torch.stack([norm.to(gradients[0].device) for norm in norms]))
        factor = torch.clamp(self._max_norm / (self.total_norm + 1e-6), max=1.0)
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            torch._foreach_mul_(gradients, factor)


def _norms(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each one's, by the kernels of torch's clipping: a GPU has one for many tensors, with sums of its own."""
    found: dict[int, torch.Tensor] = {}
    for kind in {(each.device, each.dtype) for each in gradients}:
        alike = [i for i, each in enumerate(gradients) if (each.device, each.dtype) == kind]
        found |= dict(zip(alike, torch._foreach_norm([gradients[i] for i in alike]), strict=True))
    return [found[i] for i in range(len(gradients))]


def _by_type(slots: Sequence[ParameterState]) -> list[ParameterState]:
    """The order in which torch sums: by type, and the types in the order that torch's own grouping gives."""
    with torch._C.DisableTorchFunctionSubclass():
        grouped = _group_tensors_by_device_and_dtype([[slot.gradient.detach() for slot in slots]], with_indices=True)
    return [slots[index] for _, indices in grouped.values() for index in indices]
