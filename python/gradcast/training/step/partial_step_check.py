"""Checks whether an optimizer's step can run in parts: on a small copy, parts and whole steps must agree, and no
collective operation may start. The copy also shows which settings a step reads."""

import collections
import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from gradcast.errors import Error, refused
from gradcast.training.compat.sharding import local_of
from gradcast.training.step.partial_step import PartialStep, step_without_hooks
from gradcast.training.step.step_settings import Read

# Scales of gradients, each for some steps, to reach an optimizer's thresholds and counters.
_SCALES = (1.0, 1e6, 1e-6)
_STEPS_PER_SCALE = 4
_MAX_PER_GROUP = 6
_LARGEST_SIDE = 3
# Attributes of the optimizer that a trial makes itself instead of copying them.
_LEFT_OUT = frozenset({"step", "state", "param_groups"})
_COLLECTIVES = frozenset({"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"})


def require_splittable(optimizer: Optimizer) -> Read | None:
    """Returns the settings that a step reads; None if that cannot be watched. Raises Error(invalid_use) if a step in
    parts does not equal a whole step bit for bit, or starts a collective operation.

    An optimizer that updates parameters one by one passes. One that looks at all of them together (a norm over all
    gradients, one step size for all, a line search) does not. A difference that shows only after more steps, or only
    with special gradients, is not found. Global random number generators are left as they were.
    """
    name = type(optimizer).__name__
    with torch.random.fork_rng(devices=[]), _without_global_hooks():
        read = _read_in_steps(optimizer)
    try:
        # The message of what an optimizer raises here is part of ours.
        with torch.random.fork_rng(devices=[]), _without_global_hooks():
            whole, parts = _Trial(optimizer), _Trial(optimizer)
            for step, scale in _steps():
                whole.step(step, scale, [whole.parameters])
                parts.step(step, scale, _uneven_parts(parts.parameters))
    except Exception as error:
        raise _refusal(name, f"a step on a small copy of it fails: {type(error).__name__}: {error}") from error
    if not whole.equals(parts):
        together = "it looks at all gradients together, or draws random numbers"
        raise _refusal(name, f"two parts give other numbers than a whole step: {together}")
    return read


@contextlib.contextmanager
def _without_global_hooks() -> Iterator[None]:
    """Hides the program's step hooks for all optimizers, which torch also runs around a base class's step."""
    of_all: list[dict[int, Any]] = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
    kept = [(hooks, dict(hooks)) for hooks in of_all]
    try:
        for hooks, _ in kept:
            hooks.clear()
        yield
    finally:
        for hooks, before in kept:
            hooks.update(before)


def _steps() -> Iterator[tuple[int, float]]:
    """Numbers of steps, and the scale of their gradients."""
    return enumerate(scale for scale in _SCALES for _ in range(_STEPS_PER_SCALE))


def _read_in_steps(optimizer: Optimizer) -> Read | None:
    """Watches whole steps. Operations with other ranks are refused; other failures only end the watching."""
    attributes: set[str] = set()
    in_groups: set[str] = set()
    try:
        watched = _Trial(optimizer, _watched_class(type(optimizer), attributes))
        in_defaults = watched.watch_groups(in_groups)
        attributes.clear()
        with _NoCollectives():
            for step, scale in _steps():
                watched.step(step, scale, [watched.parameters])
    except _CollectiveError as error:
        raise _refusal(
            type(optimizer).__name__,
            f"its step() starts a collective operation, {error}, and which parameters are updated together differs "
            "between ranks",
        ) from None
    except Exception:  # a class that takes no subclass, say; a step that fails by itself is refused elsewhere
        return None
    if in_defaults <= {"differentiable"}:  # torch's own wrapper around step() reads that
        attributes.discard("defaults")
    return Read(frozenset(in_groups), frozenset(attributes))


class _CollectiveError(Exception):
    pass


class _NoCollectives(TorchDispatchMode):
    """Raises _CollectiveError before a collective operation starts."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace in _COLLECTIVES:
            raise _CollectiveError(function._schema.name.rpartition("::")[2])
        return function(*args, **(kwargs or {}))


def _watched_class(kind: type, read: set[str]) -> type:
    """A subclass that notes the names of attributes that are read."""

    def get(self: Any, name: str) -> Any:
        read.add(name)
        return cast(Any, kind).__getattribute__(self, name)

    return type(kind.__name__, (kind,), {"__getattribute__": get})


class _WatchedGroup(dict):
    """Notes the keys that are read: the one that is looked up, or all, since any value can be reached by iterating."""

    def __init__(self, group: dict[str, Any], read: set[str]) -> None:
        super().__init__(group)
        self._read = read

    def copy(self) -> Any:
        return dict(self)


def _noting(name: str) -> Callable[..., Any]:
    method = getattr(dict, name)

    def noting(self: _WatchedGroup, *arguments: Any) -> Any:
        self._read.update(arguments[:1] or dict.keys(self))
        return method(self, *arguments)

    return noting


# ``{**group}`` uses __iter__ because there is one.
for _name in ("__getitem__", "get", "setdefault", "__iter__", "keys", "values", "items"):
    setattr(_WatchedGroup, _name, _noting(_name))


def _refusal(name: str, reason: str) -> Error:
    return refused(
        f"the updates of {name} cannot run in parts while gradients arrive ({reason}); use hook mode: "
        "gradcast.attach(module) without the optimizer"
    )


class _Trial:
    """A copy of an optimizer with the same settings, over small parameters with the same numbers of dimensions."""

    def __init__(self, optimizer: Optimizer, kind: type | None = None) -> None:
        """``kind``: the copy's class."""
        generator = torch.Generator().manual_seed(0)
        # Not copy.copy(): __setstate__() would write defaults into groups that both share.
        made: Any = object.__new__(kind or type(optimizer))
        self._optimizer = made
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

    def watch_groups(self, read: set[str]) -> set[str]:
        """Adds to ``read`` the keys of groups that are read from now on. Returns those of ``defaults``."""
        optimizer, in_defaults = self._optimizer, set[str]()
        optimizer.param_groups = [_WatchedGroup(group, read) for group in optimizer.param_groups]
        optimizer.defaults = _WatchedGroup(optimizer.defaults, in_defaults)
        return in_defaults

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
        if local_of(parameter).numel() > 0:
            by_dimensions.setdefault(parameter.dim(), []).append(parameter)
    count = max(2, _MAX_PER_GROUP // max(1, len(by_dimensions)))
    return [parameter for alike in by_dimensions.values() for parameter in alike[:count]]


def _shrunk(value: Any) -> Any:
    """A tensor's first corner. State has its parameter's shape, or a shape derived from it."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    value = local_of(value)
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
