"""Checks that the doctor can diagnose a training."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradcast.diagnosis.probe.prober import comm_hooks


def obstacle(ddp: DistributedDataParallel, optimizers: Sequence[Optimizer]) -> str | None:
    """Returns why this training cannot be diagnosed, or None if it can. The answer is the same on all ranks."""
    members, everybody = dist.get_world_size(ddp.process_group), dist.get_world_size()
    if members == 1:
        return "there is one worker, so there is no communication to diagnose; start two or more with torchrun"
    if members < everybody:
        return (
            f"the module's gradients are averaged over {members} of {everybody} ranks, and the other ranks cannot take "
            "part in the doctor's steps; diagnose a module whose process group has all ranks"
        )
    for name in ("mixed_precision", "_delay_all_reduce_params"):
        if getattr(ddp, name, None):
            return f"the doctor's steps do not support DDP's {name.strip('_')}; omit it for the diagnosis"
    for each in optimizers:
        name = type(each).__name__
        if _needs_arguments(type(each).step):
            return f"{name}.step() needs a closure, which the doctor's steps do not have; use another optimizer"
        if any(isinstance(value, Optimizer) for value in vars(each).values()):
            return f"{name} wraps another optimizer, whose state would not be restored; use the inner one alone"
    return _hook_obstacle(ddp)


def updates(optimizer: Optimizer, module: nn.Module) -> bool:
    owned = {id(parameter) for parameter in module.parameters()}
    return any(id(parameter) in owned for group in optimizer.param_groups for parameter in group["params"])


def _needs_arguments(step: Callable[..., Any]) -> bool:
    given = list(inspect.signature(step).parameters.values())[1:]  # without self
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_ONLY)
    return any(each.kind in named and each.default is inspect.Parameter.empty for each in given)


def _hook_obstacle(ddp: DistributedDataParallel) -> str | None:
    hooks = comm_hooks(ddp)
    for function, state in hooks:
        stateless = state is None or isinstance(state, dist.ProcessGroup)
        if getattr(function, "__module__", None) != default_hooks.__name__ or not stateless:
            return (
                f"the communication hook {getattr(function, '__name__', function)} is not one of torch's stateless "
                "ones; omit it for the diagnosis"
            )
    if not hooks and ddp._get_ddp_logging_data().get("comm_hook"):
        return "a C++ communication hook is registered; omit it for the diagnosis"
    return None
