"""The optimizer's state while updates are pending: any access waits for them first.

A tensor of the state to which the program has kept a reference is as pending as its parameter. Everything else is
reached through ``optimizer.state``, which is guarded itself; an update may also replace numbers, add tensors, and
create the entries of the first step. One access is not seen: a number in the entry of one parameter
(``optimizer.state[p]``) to which the program has kept a reference.

Thread safety: under the session's lock, which an access takes.
"""

import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch.optim import Optimizer

from gradcast.training.compat import extension, reference_counts
from gradcast.training.step import pending
from gradcast.training.step.parameter_state import ParameterState

Lock = Callable[[], contextlib.AbstractContextManager]


class _OpenState(collections.defaultdict):
    """The class of a GuardedState while its optimizer runs, which waits for nothing."""


class GuardedState(_OpenState):
    """Replaces ``optimizer.state``. ``before_access`` runs before each access. Copies are ordinary dicts."""

    def __init__(self, held: Any, before_access: Callable[[], None]) -> None:
        super().__init__(dict, held)
        self._before_access = before_access

    def __reduce__(self) -> Any:
        self._before_access()
        return collections.defaultdict, (dict,), None, None, iter(super().items())

    def __copy__(self) -> Any:
        return self.copy()

    def copy(self) -> Any:
        self._before_access()
        return collections.defaultdict(dict, super().items())


def _guarded(name: str) -> Callable[..., Any]:
    method = getattr(collections.defaultdict, name)

    def guarded(self: GuardedState, *arguments: Any, **named: Any) -> Any:
        self._before_access()
        return method(self, *arguments, **named)

    guarded.__name__ = name
    return guarded


for _name in (
    "__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__len__", "__eq__", "__ne__", "__or__",
    "__ior__", "__repr__", "__reversed__", "clear", "get", "items", "keys", "pop", "popitem", "setdefault", "update",
    "values",
):  # fmt: skip
    setattr(GuardedState, _name, _guarded(_name))


class OptimizerStateGuard:
    """Guards the state of one optimizer. ``complete_updates`` runs every pending update. ``lock`` returns the
    session's, which a forked child replaces."""

    def __init__(self, optimizer: Optimizer, complete_updates: Callable[[], None], lock: Lock) -> None:
        self._optimizer: Any = optimizer  # None once it is released
        self._complete_updates, self._lock = complete_updates, lock
        self._is_updating = False
        self._guarded: GuardedState | None = None  # the state of the step whose updates are pending
        self._entries: dict[int, tuple[ParameterState, list[torch.Tensor]]] = {}  # by index: its pending tensors
        self._pending_ids: set[int] = set()  # of these tensors, and of some that are pending no more
        self._are_shared = False  # whether some tensor is in several entries

    @property
    def is_held(self) -> bool:
        """True if the program holds the dict ``optimizer.state`` itself, in which it would miss entries of updates."""
        return type(self._optimizer.state) is not GuardedState and reference_counts.is_kept(self._optimizer, "state")

    def guard(self, states: Sequence[ParameterState], owner: pending.Owner) -> None:
        """Guards the state of these parameters, whose updates are pending from now on."""
        if type(self._optimizer.state) is not GuardedState:  # also after load_state_dict(), which makes another dict
            self._optimizer.state = GuardedState(self._optimizer.state, self._before_access)
        self._guarded = None  # a reference of ours would look like one of the program's
        held = extension.load().entries_held(vars(self._optimizer))
        if held is None:  # the optimizer keeps its state elsewhere
            held = {id(state.parameter) for state in states}
        for state in states if held else ():
            if id(state.parameter) in held:
                entry = dict.get(self._optimizer.state, state.parameter)
                self._entries[state.index] = state, _tensors_in(entry) if entry else []
        tensors = self._tensors()
        self._guarded = self._optimizer.state
        self._pending_ids = set(map(id, tensors))
        self._are_shared = len(self._pending_ids) < len(tensors)
        pending.mark(tensors, owner)

    def clear(self, states: Sequence[ParameterState]) -> None:
        """Ends the guard of these parameters' state: their updates are about to run."""
        if not self._entries:
            return
        entries = [self._entries.pop(state.index) for state in states if state.index in self._entries]
        finished = [tensor for _, tensors in entries for tensor in tensors]
        if self._are_shared:
            left = set(map(id, self._tensors()))
            finished = [tensor for tensor in finished if id(tensor) not in left]
        pending.clear(finished)

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor for _, tensors in self._entries.values() for tensor in tensors]

    def parameters_changing(self, tensor: torch.Tensor) -> list[ParameterState] | None:
        """Parameters whose updates change this tensor: none while the optimizer itself runs. None if the tensor is not
        of this state, or not pending."""
        if id(tensor) not in self._pending_ids:
            return None
        found = [state for state, tensors in self._entries.values() if any(each is tensor for each in tensors)]
        return ([] if self._is_updating else found) if found else None

    @contextlib.contextmanager
    def open(self, *, hidden: bool = False) -> Iterator[None]:
        """Context of the optimizer's own step, which waits for nothing. ``hidden``: other threads wait for its end."""
        self._is_updating = True
        if not hidden:
            cast(Any, self._guarded).__class__ = _OpenState  # asks nobody
        try:
            yield
        finally:
            self._is_updating = False
            self._guarded.__class__ = GuardedState

    def end_step(self) -> None:
        """Notes that no update is pending any more."""
        self._guarded = None  # the program may have replaced it

    def release(self) -> None:
        """Gives the optimizer an ordinary state again, whether or not updates are pending. Idempotent."""
        if self._optimizer is None:
            return
        self.end_step()
        pending.clear(self._tensors())
        self._entries.clear()
        state = self._optimizer.state
        if type(state) is GuardedState:
            self._optimizer.state = collections.defaultdict(dict, dict.items(state))
        self._optimizer = None

    def _before_access(self) -> None:
        with self._lock():
            if not self._is_updating:
                self._complete_updates()


def _tensors_in(entry: Any) -> list[torch.Tensor]:
    if type(entry) is dict and set(map(type, entry.values())) == {torch.Tensor}:  # torch's own: no need to look deeper
        return list(entry.values())
    return list(pending.tensors_in(entry))
