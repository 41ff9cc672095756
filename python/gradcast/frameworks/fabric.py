"""For Lightning Fabric: ``attach(fabric, model, optimizer)`` behind ``fabric.setup``."""

from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.optim import Optimizer

import gradcast
from gradcast.errors import refused
from gradcast.frameworks.clipping import ClipCalls, replace


def attach(
    fabric: Fabric, model: nn.Module, optimizer: Any = None, *, options: gradcast.Options | None = None
) -> gradcast.Handle:
    """Calls ``gradcast.attach`` with the results of ``fabric.setup``. If the options clip, gradcast also clips in place
    of ``fabric.clip_gradients``. Reading the returned norm waits; with ``error_if_nonfinite`` the error is raised where
    the step's norm or parameters are read."""
    strategy = fabric.strategy
    if options is not None and options.clips and getattr(strategy.precision, "scaler", None) is not None:
        raise refused("gradcast does not clip in steps with a GradScaler; omit clipping from the options")
    handle = gradcast.attach(model, optimizer, options=options)
    calls = ClipCalls(handle, options)
    own_norm, own_value = strategy.clip_gradients_norm, strategy.clip_gradients_value

    def clip_gradients_norm(
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        def own() -> torch.Tensor:
            return own_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)

        parameters = strategy.precision.main_params(optimizer)
        return calls.norm(own, parameters, max_norm, norm_type, error_if_nonfinite)

    def clip_gradients_value(module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        parameters = strategy.precision.main_params(optimizer)
        calls.value(lambda: own_value(module, optimizer, clip_val), parameters, clip_val)

    replace(strategy, clip_gradients_norm=clip_gradients_norm, clip_gradients_value=clip_gradients_value)
    return handle
