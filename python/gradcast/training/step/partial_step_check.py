"""Checks whether an optimizer's step can run in parts: on a small copy, parts and whole steps must agree."""

import collections
import copy
from typing import Any

import torch
from torch.optim import Optimizer

from gradcast.errors import Error, refused
from gradcast.training.step.partial_step import PartialStep, step_without_hooks

# Scales of gradients, each for some steps, to reach an optimizer's thresholds and counters.
_SCALES = (1.0, 1e6, 1e-6)
_STEPS_PER_SCALE = 4
_MAX_PER_GROUP = 6
_LARGEST_SIDE = 3
# Attributes of the optimizer that a trial makes itself instead of copying them.
_LEFT_OUT = frozenset({"step", "state", "param_groups"})


def require_splittable(optimizer: Optimizer) -> None:
    """Raises Error(invalid_use) if a step in parts does not equal a whole step bit for bit.

    An optimizer that updates parameters one by one passes. One that looks at all of them together (a norm over all
    gradients, one step size for all, a line search) does not. A difference that shows only after more steps, or only
    with special gradients, is not found. Global random number generators are left as they were.
    """
    name = type(optimizer).__name__
    try:
        # The message of what an optimizer raises here is part of ours.
        with torch.random.fork_rng(devices=[]):
            whole, parts = _Trial(optimizer), _Trial(optimizer)
            for step in range(_STEPS_PER_SCALE * len(_SCALES)):
                scale = _SCALES[step // _STEPS_PER_SCALE]
                whole.step(step, scale, [whole.parameters])
                parts.step(step, scale, _uneven_parts(parts.parameters))
    except Exception as error:
        raise _refusal(name, f"a step on a small copy of it fails: {type(error).__name__}: {error}") from error
    if not whole.equals(parts):
        together = "it looks at all gradients together, or draws random numbers"
        raise _refusal(name, f"two parts give other numbers than a whole step: {together}")


def _refusal(name: str, reason: str) -> Error:
    return refused(
        f"the updates of {name} cannot run in parts while gradients arrive ({reason}); use hook mode: "
        "gradcast.attach(module) without the optimizer"
    )


class _Trial:
    """A copy of an optimizer with the same settings, over small parameters with the same numbers of dimensions."""

    def __init__(self, optimizer: Optimizer) -> None:
        generator = torch.Generator().manual_seed(0)
        # Not copy.copy(): __setstate__() would write defaults into groups that both share.
        self._optimizer = object.__new__(type(optimizer))
        memo: dict[int, Any] = {id(optimizer): self._optimizer, id(optimizer.state): collections.defaultdict(dict)}
        groups = []
        self.parameters: list[torch.Tensor] = []
        state: collections.defaultdict[Any, dict] = collections.defaultdict(dict)
        for group in optimizer.param_groups:
            members = []
            for parameter in _some([each for each in group["params"] if each.is_floating_point()]):
                members.append(torch.nn.Parameter(_random(_shrunk(parameter.detach()), generator)))
                memo[id(parameter)] = members[-1]
                if parameter in optimizer.state:
                    state[members[-1]] = {key: _shrunk(value) for key, value in optimizer.state[parameter].items()}
            settings = {key: copy.deepcopy(value, dict(memo)) for key, value in group.items() if key != "params"}
            groups.append({**settings, "params": members})
            self.parameters += members
        self._optimizer.__dict__ = {
            key: _empty(value) if key.endswith("_hooks") else copy.deepcopy(value, memo)
            for key, value in vars(optimizer).items()
            if key not in _LEFT_OUT
        }
        self._optimizer.state = state
        self._optimizer.param_groups = groups

    def step(self, number: int, scale: float, parts: list[list[torch.Tensor]]) -> None:
        generator = torch.Generator().manual_seed(1 + number)
        for parameter in self.parameters:
            parameter.grad = _random(parameter, generator) * scale
        if len(parts) == 1:
            step_without_hooks(self._optimizer)(self._optimizer)
            return
        partial = PartialStep(self._optimizer)
        for part in parts:
            partial.run(part, last=part is parts[-1], elsewhere=number % 2 == 1)

    def equals(self, other: "_Trial") -> bool:
        mine, theirs = self._values(), other._values()
        return len(mine) == len(theirs) and all(map(_equal, mine, theirs))

    def _values(self) -> list[Any]:
        values: list[Any] = list(self.parameters)
        for parameter in self.parameters:
            state = self._optimizer.state[parameter]
            values += [entry for key in sorted(state, key=str) for entry in (key, state[key])]
        for group in self._optimizer.param_groups:
            values += [value for key, value in sorted(group.items()) if key != "params"]
        values += [value for key, value in sorted(vars(self._optimizer).items()) if key not in _LEFT_OUT]
        return values


def _uneven_parts(parameters: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Three parts, from the last parameter to the first, as gradients arrive."""
    first, second = len(parameters) // 6, len(parameters) // 2
    return [part for part in (parameters[second:], parameters[first:second], parameters[:first]) if part]


def _some(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """A few parameters of each number of dimensions."""
    by_dimensions: dict[int, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.numel() > 0:
            by_dimensions.setdefault(parameter.dim(), []).append(parameter)
    count = max(2, _MAX_PER_GROUP // max(1, len(by_dimensions)))
    return [parameter for alike in by_dimensions.values() for parameter in alike[:count]]


def _shrunk(value: Any) -> Any:
    """A tensor's first corner. State has its parameter's shape, or a shape derived from it."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    return value.detach()[tuple(slice(_LARGEST_SIDE) for _ in value.shape)].clone()


def _random(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(like.shape, generator=generator, device="cpu").to(like)


def _empty(hooks: Any) -> Any:
    return type(hooks)() if isinstance(hooks, dict) else hooks


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        # Both may have diverged to NaN.
        same = one.dtype == other.dtype and torch.equal(one.isnan(), other.isnan())
        return same and torch.equal(one.nan_to_num(), other.nan_to_num())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return type(one) is type(other) and (one == other or not isinstance(one, int | float | str | bool))
