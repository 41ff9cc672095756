"""The state of a training, taken before steps that are not the user's and given back afterwards, bit for bit.

Held are parameters, buffers and gradients of the module, the optimizers' state and settings, and the random generators
of torch, NumPy and Python. Not held, because nothing of it is used: the loop, its data, schedulers, scalers. Not held,
because it cannot be seen: what a module's forward keeps outside of its buffers.
"""

import copy
import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class Snapshot:
    """Copies lie in the host's memory, so that a device needs no room for them."""

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._tensors = [(each, _copy(each)) for each in (*module.parameters(), *module.buffers())]
        # The gradients themselves stay where they are; steps in between make their own.
        self._gradients = [(each, each.grad) for each in module.parameters()]
        self._optimizers = [_OptimizerState(each) for each in optimizers]
        self._random = _random_states()
        for each, _ in self._gradients:
            each.grad = None

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, kept in self._tensors:
                tensor.copy_(kept)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for each in self._optimizers:
            each.restore()
        _set_random_states(self._random)


class _OptimizerState:
    """Hooks that a user has put on the optimizer, an average of the weights for instance, rest meanwhile."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._state = {owner: {key: _copy(value) for key, value in of.items()} for owner, of in optimizer.state.items()}
        self._groups = [
            {key: _copy(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]
        self._hooks = (dict(optimizer._optimizer_step_pre_hooks), dict(optimizer._optimizer_step_post_hooks))
        optimizer._optimizer_step_pre_hooks.clear()
        optimizer._optimizer_step_post_hooks.clear()

    def restore(self) -> None:
        optimizer = self._optimizer
        for owner in [owner for owner in optimizer.state if owner not in self._state]:
            del optimizer.state[owner]
        for owner, kept in self._state.items():
            _refill(optimizer.state[owner], kept)
        for group, kept in zip(optimizer.param_groups, self._groups, strict=True):
            _refill(group, {"params": group["params"], **kept})
        optimizer._optimizer_step_pre_hooks.update(self._hooks[0])
        optimizer._optimizer_step_post_hooks.update(self._hooks[1])


def _copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _refill(target: dict[str, Any], kept: dict[str, Any]) -> None:
    """The dictionary and its tensors stay the objects that they were, for whoever else holds them."""
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
