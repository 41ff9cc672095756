"""Functions of the program that are called with each parameter whose update has run: averages, norms, logs.

In overlap mode a session calls them part by part, as the updates run. Otherwise they are called after ``step()``, of
whichever optimizer: in hook mode gradcast is given none. Either way they get each parameter once per step.

Thread safety: ``run`` under the session's lock; everything else from the training thread.
"""

import collections
import dataclasses
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradcast.errors import Error, refused
from gradcast.training.compat.module_hooks import WeakHook
from gradcast.training.step import parameter_state
from gradcast.training.step.parameter_state import ParameterState
from gradcast.training.step.partial_step import default_context

UpdateFunction = Callable[[list[str], list[nn.Parameter]], Any]
Owned = nn.Module | Mapping[str, torch.Tensor | Iterable[torch.Tensor]]


@dataclasses.dataclass(eq=False)
class UpdateCallback:
    """Functions of the program. ``owned``: tensors that ``function`` writes, by name of their parameter.
    ``after_step``: called with all trained names once per step, where ``step()`` returns. ``without_forward``: called
    where a step begins in which this rank has no samples. ``on_detach``: called when gradcast has left the module."""

    function: UpdateFunction = lambda _names, _parameters: None
    owned: Mapping[str, tuple[torch.Tensor, ...]] = dataclasses.field(default_factory=dict)
    after_step: Callable[[Sequence[str]], None] | None = None
    without_forward: Callable[[], None] | None = None
    on_detach: Callable[[], None] | None = None


class UpdateCallbacks:
    """The callbacks of one attached module, whose sessions come and go. ``noted``: updated parts, by name, that the
    functions have not been called with yet. ``in_parts``: a session calls ``run``."""

    def __init__(self, parameters: dict[str, nn.Parameter], *, in_parts: bool) -> None:
        self.in_parts = in_parts
        self._callbacks: list[UpdateCallback] = []
        self.noted: collections.deque[dict[str, nn.Parameter]] = collections.deque()
        self._unhook: Callable[[], Any] | None = None  # while functions are called after each step() of any optimizer
        self.follow(parameters)

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def follow(self, parameters: dict[str, nn.Parameter]) -> None:
        """Replaces the trained parameters, by name."""
        self._parameters = parameters

    def add(self, callback: UpdateCallback) -> None:
        self._callbacks.append(callback)
        if self._unhook is None:
            hook = register_optimizer_step_post_hook(WeakHook(self._after_step))
            self._unhook = weakref.finalize(self, hook.remove)

    def remove(self, callback: UpdateCallback) -> None:
        """Removes a callback. The hook after ``step()`` stays: torch may be going through these hooks now."""
        if callback in self._callbacks:
            self._callbacks.remove(callback)

    def remove_all(self) -> None:
        for callback in list(self._callbacks):
            self.remove(callback)
            if callback.on_detach is not None:
                callback.on_detach()
        self._parameters = {}
        self.noted.clear()
        if self._unhook is not None:
            self._unhook()
            self._unhook = None

    def without_forward(self) -> None:
        for callback in self._callbacks:
            if callback.without_forward is not None:
                callback.without_forward()

    def owned(self, name: str) -> tuple[torch.Tensor, ...]:
        """The tensors that are written when this parameter has been updated."""
        return tuple(tensor for callback in self._callbacks for tensor in callback.owned.get(name, ()))

    def note(self, states: Sequence[ParameterState]) -> None:
        """Notes that these parameters have been updated."""
        if self._callbacks:
            self.noted.append({state.name: state.parameter for state in states})

    def run(self, when: str) -> None:
        """Calls every function with each part that was noted, in the order of registration. ``when``: for messages.

        Raises Error for the first function that has raised, after all have been called.
        """
        failures = []
        while self.noted:
            part = self.noted.popleft()
            for callback in list(self._callbacks):
                try:
                    with default_context(), torch.no_grad():  # in this order: leaving inference mode enables gradients
                        callback.function(list(part), list(part.values()))
                except Exception as error:
                    failures.append((error, list(part)))
        for failure, names in failures[:1]:
            raise Error(
                f"a function of handle.on_update() has failed for {parameter_state.shown(names)} {when} "
                f"({type(failure).__name__}: {failure}); the parameters are updated, and training can go on, but what "
                "the function keeps may lack this step",
                failure.code if isinstance(failure, Error) else "invalid_use",
            ) from failure

    def _after_step(self, optimizer: Optimizer, _arguments: Any, _named: Any) -> None:
        if not self._callbacks or is_inner_step(optimizer):
            return
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        updated = {name: parameter for name, parameter in self._parameters.items() if id(parameter) in held}
        if not updated:
            return
        if not self.in_parts:
            self.noted.append(updated)
            self.run("after step()")
        if next(iter(self._parameters)) in updated:  # of several optimizers, the one that makes a step count
            for callback in list(self._callbacks):
                if callback.after_step is not None:
                    callback.after_step(list(self._parameters))


class UpdateRegistration:
    """A function of ``Handle.on_update`` or an average of ``Handle.keep_average``. ``attached``: see Attached."""

    def __init__(self, attached: Any, callback: UpdateCallback) -> None:
        self._attached, self._callback = attached, callback
        self._change(attached.callbacks.add)

    def remove(self) -> None:
        """Ends the calls, after pending updates. Idempotent."""
        self._change(self._attached.callbacks.remove)

    def _change(self, change: Callable[[UpdateCallback], None]) -> None:
        session = self._attached.session
        if not session.released:
            session.complete_updates()
        change(self._callback)
        if not session.released:
            session.on_callbacks_changed()


def owned_tensors(owned: Owned | None, module: nn.Module) -> dict[str, tuple[torch.Tensor, ...]]:
    """The tensors by name of their parameter. Raises Error(invalid_use) if they cannot be waited for."""
    if owned is None:
        return {}
    given = dict(owned.named_parameters()) if isinstance(owned, nn.Module) else owned
    found = {n: (each,) if isinstance(each, torch.Tensor) else tuple(each) for n, each in given.items()}
    own = dict(module.named_parameters())
    unknown = [name for name in found if name not in own]
    if unknown:
        raise refused(
            f"owned names {parameter_state.shown(unknown)}, and the module has no such parameter; use the names of "
            "module.named_parameters(), for an AveragedModel those of averaged.module"
        )
    taken = set(map(id, own.values()))
    for name, tensors in found.items():
        for tensor in tensors:
            if id(tensor) in taken:
                raise refused(
                    f"a tensor that owned gives for {name} is a parameter of the module, or is given twice; pass the "
                    "tensors that the function writes, each for one parameter"
                )
            taken.add(id(tensor))
    return found


def is_inner_step(optimizer: Optimizer) -> bool:
    """Returns whether a class's step() has called that of its base class, around which torch runs hooks, too."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "step" and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False
