"""The optimizer's state while updates are due: whoever reads or changes it waits for them first.

A tensor of the state is as pending as its parameter, however somebody got hold of it. ``optimizer.state`` itself is
guarded as well, since an update may put something else in there: numbers, new tensors, the entries of the first step.
What is not seen: a number in the entry of one parameter (``optimizer.state[p]``) that somebody has held since before.

Thread safety: under the session's lock.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from gradcast.training.step import pending
from gradcast.training.step.parameter_state import ParameterState


class GuardedState(collections.defaultdict):
    """In the place of ``optimizer.state``. ``finish`` runs before anybody looks at it. Copies are ordinary dicts."""

    def __init__(self, held: Any, finish: Callable[[], None]) -> None:
        super().__init__(dict, held)
        self._finish = finish

    def __reduce__(self) -> Any:
        self._finish()
        return collections.defaultdict, (dict,), None, None, iter(super().items())

    def __copy__(self) -> Any:
        return self.copy()

    def copy(self) -> Any:
        self._finish()
        return collections.defaultdict(dict, super().items())


def _guarded(name: str) -> Callable[..., Any]:
    method = getattr(collections.defaultdict, name)

    def guarded(self: GuardedState, *arguments: Any, **named: Any) -> Any:
        self._finish()
        return method(self, *arguments, **named)

    guarded.__name__ = name
    return guarded


for _name in (
    "__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__len__", "__eq__", "__ne__", "__or__",
    "__ior__", "__repr__", "__reversed__", "clear", "get", "items", "keys", "pop", "popitem", "setdefault", "update",
    "values",
):  # fmt: skip
    setattr(GuardedState, _name, _guarded(_name))


class PendingState:
    """Of one optimizer. ``finish``: runs every update that is due; nothing where none is."""

    def __init__(self, optimizer: Optimizer, finish: Callable[[], None]) -> None:
        self._optimizer, self._finish = optimizer, finish
        self._running = False
        self._tensors: dict[int, list[torch.Tensor]] = {}  # by slot, those of its parameter's entry that are pending
        self._slots: dict[int, list[ParameterState]] = {}  # by id of a tensor: whose updates change it

    def mark(self, slots: Sequence[ParameterState], owner: pending.Owner) -> None:
        """The updates of these are due from now on."""
        held = self._optimizer.state
        if type(held) is not GuardedState:  # load_state_dict() makes another one
            self._optimizer.state = GuardedState(held, self._look)
        for slot in slots:
            entry = dict.get(self._optimizer.state, slot.parameter)
            tensors = list(_tensors_in(entry)) if entry else []
            self._tensors[slot.index] = tensors
            for tensor in tensors:
                self._slots.setdefault(id(tensor), []).append(slot)
                if not pending.is_pending(tensor):
                    pending.mark(tensor, owner)

    def clear(self, slots: Sequence[ParameterState]) -> None:
        """The updates of these are about to run."""
        for slot in slots:
            for tensor in self._tensors.pop(slot.index, ()):
                waiting = self._slots[id(tensor)]
                waiting.remove(slot)
                if not waiting:
                    del self._slots[id(tensor)]
                    pending.clear(tensor)

    def slots_of(self, tensor: torch.Tensor) -> list[ParameterState] | None:
        """Whose updates change this tensor; None where it is not of this state, or the optimizer itself looks."""
        return self._slots.get(id(tensor))

    @property
    def running(self) -> bool:
        return self._running

    def update(self, action: Callable[[], None]) -> None:
        """The optimizer's own step, which waits for nothing."""
        self._running = True
        try:
            action()
        finally:
            self._running = False

    def release(self) -> None:
        """The optimizer has an ordinary state again, whatever was still due."""
        for tensors in self._tensors.values():
            for tensor in tensors:
                pending.clear(tensor)
        self._tensors.clear()
        self._slots.clear()
        state = self._optimizer.state
        if type(state) is GuardedState:
            self._optimizer.state = collections.defaultdict(dict, dict.items(state))

    def _look(self) -> None:
        if not self._running:
            self._finish()


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each)
