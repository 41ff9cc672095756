"""For Accelerate: ``attach(accelerator, model, optimizer)`` behind ``accelerator.prepare``."""

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

import gradcast
from gradcast.frameworks.clipping import ClipCalls, replace

CLIP_CALLS = ("clip_grad_norm_", "clip_grad_value_")


def attach(
    accelerator: Accelerator, model: nn.Module, optimizer: Any = None, *, options: gradcast.Options | None = None
) -> gradcast.Handle:
    """Calls ``gradcast.attach`` with the results of ``accelerator.prepare``. If the options clip, gradcast also clips
    in place of ``accelerator.clip_grad_norm_`` and ``clip_grad_value_``. Reading the returned norm waits."""
    handle = gradcast.attach(model, optimizer, options=options)
    take_over(accelerator, ClipCalls(handle, options))
    return handle


def take_over(accelerator: Accelerator, calls: ClipCalls) -> None:
    """Redirects the accelerator's clip calls to ``calls``."""
    own_norm, own_value = (getattr(accelerator, name) for name in CLIP_CALLS)

    def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor | None:
        parameters = _listed(parameters)
        return calls.norm(lambda: own_norm(parameters, max_norm, norm_type), parameters, max_norm, norm_type)

    def clip_grad_value_(parameters: Any, clip_value: float) -> None:
        parameters = _listed(parameters)
        calls.value(lambda: own_value(parameters, clip_value), parameters, clip_value)

    replace(accelerator, clip_grad_norm_=clip_grad_norm_, clip_grad_value_=clip_grad_value_)


def _listed(parameters: Any) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
