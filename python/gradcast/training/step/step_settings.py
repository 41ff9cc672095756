"""The settings of a step: the optimizer's groups and attributes as they were when ``step()`` was called.

Updates run later, and the program may have changed settings by then, also inside of lists and dicts. A value that
cannot change is kept as it is, a group's tensor is cloned, and a **record** keeps the contents of a container: where
they no longer match, updates get a container made from it. Nobody can tell whether any other object has changed, so an
optimizer whose step() reads one cannot leave updates pending.
"""

import collections
import dataclasses
import enum
import numbers
import types
from collections.abc import Collection
from typing import Any

import torch
from torch.optim import Optimizer

from gradcast.errors import refused

_CONSTANTS = (
    numbers.Number, bytes, type(Ellipsis), enum.Enum, range, type, types.ModuleType, types.BuiltinFunctionType,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_FAST_CONSTANTS = frozenset({bool, int, float, str, type(None)})
_DICTS = (dict, collections.OrderedDict, collections.defaultdict)
CONTAINERS = (*_DICTS, list, tuple, set)
_DEEPEST = 8  # containers in one another
# Of every optimizer; its step() is given these in another way.
_OWN = frozenset({"params", "state", "param_groups"})


class Opaque(Exception):  # noqa: N818
    """A value of which nobody can tell whether it has changed."""


class _TensorRecord:
    """A tensor in a container, at a version of its values. Of a single number there is a copy."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version
        self.copy = tensor.clone() if tensor.numel() == 1 else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _TensorRecord) and self.tensor is other.tensor and self.version == other.version

    __hash__ = None  # type: ignore[assignment]


class Settings:
    """The settings in a group, or in the optimizer's attributes. ``values``: for the next part. ``opaque``: names of
    those whose changes cannot be detected."""

    def __init__(self, live: dict[str, Any], read: Collection[str] | None, optimizer: Optimizer) -> None:
        """``read``: the names that step() reads; None if that is not known."""
        self.values = {key: value for key, value in live.items() if key not in _OWN}
        self._optimizer = optimizer
        self.opaque: list[str] = []
        self._records: dict[str, Any] = {}
        self._remade: set[str] = set()  # containers that the program has changed, and that were made anew
        self._tensors = [key for key, value in self.values.items() if isinstance(value, torch.Tensor)]
        for key, value in self.values.items():
            is_hook = key.endswith("_hooks")  # of torch, which run around all parts
            if type(value) in _FAST_CONSTANTS or is_hook or (read is not None and key not in read):
                continue
            try:
                if not _is_constant(value, optimizer):
                    self._records[key] = _record(value, optimizer)
            except Opaque:
                self.opaque.append(key)

    def copies(self) -> dict[str, Any]:
        """``values``, with containers that may be changed. REQUIRES: before_part() has run, or nothing has changed."""
        return self.values | {key: _made_from(record) for key, record in self._records.items()}

    def for_part(self) -> dict[str, Any]:
        """``values``, with tensors that may be changed."""
        return self.values | {key: self.values[key].clone() for key in self._tensors}

    def before_part(self) -> None:
        """Undoes the program's changes in ``values``. Raises Error(invalid_use) for a tensor, whose former values are
        gone."""
        for key, record in self._records.items():
            if self._now(key) == record:
                continue
            try:
                self.values[key] = _made_from(record)
            except Opaque:
                raise refused(
                    f"a tensor in the optimizer's setting {key!r} was changed in place between step() and the update, "
                    "and its former values are gone; replace the tensor by a new one, or call handle.flush() first"
                ) from None
            self._records[key] = self._now(key)
            self._remade.add(key)

    def after_part(self) -> None:
        """Keeps the optimizer's own changes, after it has run."""
        for key, record in self._records.items():
            now = self._now(key)
            if now != record and key in self._remade:
                raise refused(
                    f"the optimizer's step() changes its setting {key!r}, and the program has changed it, too, between "
                    "step() and the update; replace the whole value instead of a part of it, or call handle.flush() "
                    "first"
                )
            self._records[key] = now

    def _now(self, key: str) -> Any:
        try:
            return _record(self.values[key], self._optimizer)
        except Opaque:
            return Opaque


def _is_constant(value: Any, optimizer: Optimizer) -> bool:
    """Returns whether the value cannot change. A function or method does not if it holds nothing but the optimizer."""
    if type(value) in _FAST_CONSTANTS:
        return True
    if isinstance(value, tuple | frozenset):
        return all(_is_constant(each, optimizer) for each in value)
    if isinstance(value, types.MethodType):
        return value.__self__ is optimizer
    if isinstance(value, types.FunctionType):
        held = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        return all(each is optimizer or isinstance(each, types.FunctionType | type) for each in held)
    return isinstance(value, _CONSTANTS) or value is optimizer


def _record(value: Any, optimizer: Optimizer, depth: int = 0) -> Any:
    """A record of the value, equal for equal contents. Raises Opaque."""
    kind = type(value)
    if kind in (list, tuple) and depth < _DEEPEST:
        return kind, [_record(each, optimizer, depth + 1) for each in value]
    if kind in _DICTS and depth < _DEEPEST:
        entries = [(key, _record(each, optimizer, depth + 1)) for key, each in value.items()]
        return kind, entries, getattr(value, "default_factory", None)
    if kind is set and all(_is_constant(each, optimizer) for each in value):
        return kind, set(value)
    if isinstance(value, torch.Tensor):
        return _TensorRecord(value)
    if not _is_constant(value, optimizer):
        raise Opaque
    return value


def _made_from(record: Any) -> Any:
    """The value that the record was made of. Raises Opaque for a tensor that has changed since."""
    if isinstance(record, _TensorRecord):
        if record.copy is None and record.version != record.tensor._version:
            raise Opaque
        return record.tensor if record.copy is None else record.copy.clone()
    if type(record) is not tuple or not record or record[0] not in CONTAINERS:
        return record
    kind, parts, *factory = record
    if kind in _DICTS:
        made = [(key, _made_from(part)) for key, part in parts]
        return collections.defaultdict(factory[0], made) if kind is collections.defaultdict else kind(made)
    return kind(map(_made_from, parts))


@dataclasses.dataclass(frozen=True)
class Read:
    """Names of settings that an optimizer's step() reads, as far as a trial has shown."""

    in_groups: frozenset[str]
    attributes: frozenset[str]


class StepSettings:
    """All settings of an optimizer at the call of ``step()``."""

    def __init__(self, optimizer: Optimizer, read: Read | None = None) -> None:
        """``read``: None if that is not known."""
        of_groups, of_attributes = (None, None) if read is None else (read.in_groups, read.attributes)
        self.attributes = Settings(vars(optimizer), of_attributes, optimizer)
        self.groups = [Settings(cloned(group), of_groups, optimizer) for group in optimizer.param_groups]

    @property
    def opaque(self) -> list[str]:
        """Names of settings whose changes cannot be detected."""
        return [name for each in (self.attributes, *self.groups) for name in each.opaque]


def cloned(group: dict[str, Any]) -> dict[str, Any]:
    """A group's settings as they are now. Tensors (a capturable learning rate) may change in place: cloned."""
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
