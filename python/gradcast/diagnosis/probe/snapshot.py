"""Saves the state of a training before steps that are not the user's, and restores it bit for bit afterwards.

Saved are the module's parameters, buffers and gradients, further parameters of the optimizers, the optimizers' state
and settings, and the random generators of torch, NumPy and Python. The loop, its data, schedulers and scalers are not
saved because the steps do not use them. State that a module's forward keeps outside of its buffers is not saved.

Until the restore, learning rates are 0, so that any number of steps leaves the parameters unchanged, and hooks on
optimizers are disabled.
"""

import copy
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers_module

from gradcast.random_state import random_state, restore_random_state

_GLOBAL_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
_OWN_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class Snapshot:
    """The saved state, as copies in host memory, so that the device needs no room for them."""

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        groups = [group for each in optimizers for group in each.param_groups]
        owned = [parameter for group in groups for parameter in group["params"]]
        parameters = list(dict.fromkeys([*module.parameters(), *owned]))
        self._parameters = [(each, _copy(each)) for each in parameters]
        # The gradients are not copied: the steps in between make new ones.
        self._gradients = [(each, each.grad) for each in parameters]
        # A forward pass may write into a buffer or replace its tensor.
        contents = [each._buffers for each in module.modules()]
        contents += [state for each in optimizers for state in each.state.values()]
        self._contents = [_Contents(each) for each in [*contents, *groups]]
        self._states = [(each.state, dict(each.state)) for each in optimizers]
        # The dictionaries are replaced, not emptied, because torch may be iterating over the old ones.
        self._hooks: list[tuple[Any, str, Any]]
        self._hooks = [(optimizers_module, name, getattr(optimizers_module, name)) for name in _GLOBAL_HOOKS]
        self._hooks += [(each, name, getattr(each, name)) for each in optimizers for name in _OWN_HOOKS]
        self._random = [(device, random_state(device)) for device in {each.device for each in parameters}]
        for owner, name, _ in self._hooks:
            setattr(owner, name, OrderedDict())
        for each, _ in self._gradients:
            each.grad = None
        for group in groups:
            _zero_learning_rate(group)

    def restore(self) -> None:
        for parameter, kept in self._parameters:
            _restore_tensor(parameter, kept)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for state, kept in self._states:
            state.clear()
            state.update(kept)
        for each in self._contents:
            each.restore()
        for owner, name, hooks in self._hooks:
            setattr(owner, name, hooks)
        for device, drawn in self._random:
            restore_random_state(drawn, device)


class _Contents:
    """A dictionary's contents, but for an optimizer's parameters. It and its tensors remain the same objects."""

    def __init__(self, target: dict[str, Any]) -> None:
        self._target = target
        self._kept = {key: (value, _copy(value)) for key, value in target.items() if key != "params"}

    def restore(self) -> None:
        for key in self._target.keys() - self._kept.keys() - {"params"}:
            del self._target[key]
        for key, (value, kept) in self._kept.items():
            if isinstance(value, torch.Tensor):
                _restore_tensor(value, kept)
            self._target[key] = value if isinstance(value, torch.Tensor) else kept


def _zero_learning_rate(group: dict[str, Any]) -> None:
    rate = group.get("lr")
    if isinstance(rate, torch.Tensor):
        rate.zero_()
    elif rate is not None:
        group["lr"] = 0.0


def _copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _restore_tensor(tensor: torch.Tensor, kept: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(kept)
