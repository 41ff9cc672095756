"""Saves the state of a training before steps that are not the user's, and restores it bit for bit afterwards.

Saved are the module's parameters, buffers and gradients, further parameters of the optimizers, the optimizers' state
and settings, and the random generators of torch, NumPy and Python. The loop, its data, schedulers and scalers are not
saved because the steps do not use them. What a module's forward keeps outside of its buffers cannot be seen and is not
saved.

Until the restore, learning rates are 0, so that any number of steps leaves the parameters unchanged, and hooks on
optimizers are disabled.
"""

import copy
import random
import sys
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers_module

_GLOBAL_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
_OWN_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class Snapshot:
    """The saved state, as copies in host memory, so that the device needs no room for them."""

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        groups = [group for each in optimizers for group in each.param_groups]
        owned = [parameter for group in groups for parameter in group["params"]]
        parameters = list(dict.fromkeys([*module.parameters(), *owned]))
        self._parameters = [(each, _copy(each)) for each in parameters]
        self._buffers = [_ModuleBuffers(each) for each in module.modules()]
        # The gradients are not copied: the steps in between make new ones.
        self._gradients = [(each, each.grad) for each in parameters]
        self._optimizers = [_OptimizerState(each) for each in optimizers]
        # The dictionaries are replaced, not emptied, because torch may be iterating over the old ones.
        self._hooks = [(optimizers_module, name, getattr(optimizers_module, name)) for name in _GLOBAL_HOOKS]
        self._hooks += [(each, name, getattr(each, name)) for each in optimizers for name in _OWN_HOOKS]
        self._random = _random_states()
        for owner, name, _ in self._hooks:
            setattr(owner, name, OrderedDict())
        for each, _ in self._gradients:
            each.grad = None
        for group in groups:
            _zero_learning_rate(group)

    def restore(self) -> None:
        with torch.no_grad():
            for parameter, kept in self._parameters:
                parameter.copy_(kept)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for each in [*self._buffers, *self._optimizers]:
            each.restore()
        for owner, name, hooks in self._hooks:
            setattr(owner, name, hooks)
        _set_random_states(self._random)


class _ModuleBuffers:
    """The buffers of one module. A forward pass may write into a buffer or replace its tensor."""

    def __init__(self, owner: nn.Module) -> None:
        self._owner = owner
        self._kept = {name: (each, None if each is None else _copy(each)) for name, each in owner._buffers.items()}

    def restore(self) -> None:
        buffers = self._owner._buffers
        for name in [name for name in buffers if name not in self._kept]:
            del buffers[name]
        for name, (tensor, kept) in self._kept.items():
            buffers[name] = tensor
            if tensor is not None:
                with torch.no_grad():
                    tensor.copy_(kept)


class _OptimizerState:
    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._state = {owner: {key: _copy(value) for key, value in of.items()} for owner, of in optimizer.state.items()}
        self._groups = [
            {key: _copy(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]

    def restore(self) -> None:
        optimizer = self._optimizer
        for owner in [owner for owner in optimizer.state if owner not in self._state]:
            del optimizer.state[owner]
        for owner, kept in self._state.items():
            _refill(optimizer.state[owner], kept)
        for group, kept in zip(optimizer.param_groups, self._groups, strict=True):
            _refill(group, {"params": group["params"], **kept})


def _zero_learning_rate(group: dict[str, Any]) -> None:
    rate = group.get("lr")
    if isinstance(rate, torch.Tensor):
        rate.zero_()
    elif rate is not None:
        group["lr"] = 0.0


def _copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _refill(target: dict[str, Any], kept: dict[str, Any]) -> None:
    """Restores the contents in place: the dictionary and its tensors remain the same objects, which others may hold."""
    for key in [key for key in target if key not in kept]:
        del target[key]
    with torch.no_grad():
        for key, value in kept.items():
            held = target.get(key)
            if isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor) and held.shape == value.shape:
                held.copy_(value)
            else:
                target[key] = value


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def _set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])
