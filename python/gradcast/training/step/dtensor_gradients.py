"""Gradients of tensor-parallel parameters (DTensors): the ranks with the same part send it to each other.

``.grad`` stays the DTensor that autograd has made, and the mean is copied there. Its placements are made those of the
parameter first, as FSDP makes them: a norm of SequenceParallel has a gradient that is partial, and the embedding of
RowwiseParallel one that is whole, on each rank. Otherwise updates would do that, and those that run in parts do not
run in the same order on all ranks of the mesh.
"""

from typing import Any

import torch

from gradcast.training.compat.sharding import is_part
from gradcast.training.step.gradient_hooks import GradientHooks
from gradcast.training.step.parameter_state import ParameterState


class DTensorGradients(GradientHooks):
    """For a module with some such parameters. ``parts``: the arguments of GradientHooks."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.exchange.buffers.keep_apart(state.index for state in self.states if is_part(state.parameter))

    def _place(self, state: ParameterState) -> None:
        parameter: Any = state.parameter
        gradient = parameter.grad
        if is_part(parameter) and gradient.placements != parameter.placements and not gradient.requires_grad:
            with torch.no_grad():
                parameter.grad = gradient.redistribute(placements=parameter.placements)
        super()._place(state)
