"""Clipping by the norm of all gradients inside a deferred step. The numbers are those of torch.

Every rank holds the same averaged gradients, so no rank has to ask another one. The norms of gradients that have
arrived are computed while others still travel. The first update needs all of them, so communication overlaps only with
what comes before forward, not with forward itself.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from gradcast.training.compat.module_hooks import UncopiedHook
from gradcast.training.step.parameter_state import ParameterState


class ClipOnce:
    """torch's own clipping, once per step: before the first of the optimizers updates."""

    def __init__(self, module: nn.Module, max_norm: float) -> None:
        self._module, self._max_norm = module, max_norm
        self._due = True
        # A forward pass begins the next step.
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
    """``torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)`` in pieces."""

    def __init__(self, states: Sequence[ParameterState], max_norm: float) -> None:
        self._states = states
        self._max_norm = max_norm
        self._norms: dict[int, torch.Tensor] = {}
        self.total_norm: torch.Tensor | None = None  # before clipping, of the last clipped step
        self.done = False

    def begin_step(self) -> None:
        """Gradients of a new step travel."""
        self._norms.clear()
        self.done = False

    def compute_norms(self, states: Sequence[ParameterState]) -> None:
        """Computes the norms of gradients that have arrived; they may still be pending."""
        # If this rank has not used a parameter, whether another rank has is not known yet.
        missing = [state for state in states if state.index not in self._norms and state.locally_unused is None]
        if not missing:
            return
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            norms = _norms([state.update_grad.detach() for state in missing])
        self._norms |= {state.index: norm for state, norm in zip(missing, norms, strict=True)}

    def apply_to_replaced(self) -> None:
        """Clips what ``.grad`` holds now: the program has replaced gradients that have arrived."""
        self.done = True
        self.total_norm = nn.utils.clip_grad_norm_([state.parameter for state in self._states], self._max_norm)

    def apply(self) -> None:
        """Clips all gradients. REQUIRES: all have arrived and been settled."""
        used = [state for state in self._states if state.update_grad is not None]
        self.compute_norms(used)
        self.done = True
        if not used:
            return
        gradients = [state.update_grad for state in used]
        norms = [self._norms[state.index] for state in _in_torch_order(used)]
        self.total_norm = torch.linalg.vector_norm(torch.stack([norm.to(gradients[0].device) for norm in norms]))
        factor = torch.clamp(self._max_norm / (self.total_norm + 1e-6), max=1.0)
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            torch._foreach_mul_(gradients, factor)


def _norms(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Norm of each gradient, by the kernels that torch's clipping uses: those of a GPU take many tensors at once, and
    sum in their own order."""
    found: dict[int, torch.Tensor] = {}
    for (alike,), indices in _group_tensors_by_device_and_dtype([gradients], with_indices=True).values():
        found |= zip(indices, torch._foreach_norm(alike), strict=True)
    return [found[i] for i in range(len(gradients))]


def _in_torch_order(states: Sequence[ParameterState]) -> list[ParameterState]:
    """The order in which torch sums: by device and dtype, in the order of torch's own grouping."""
    with torch._C.DisableTorchFunctionSubclass():
        gradients = [state.update_grad.detach() for state in states]
        grouped = _group_tensors_by_device_and_dtype([gradients], with_indices=True)
    return [states[index] for _, indices in grouped.values() for index in indices]
