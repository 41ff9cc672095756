"""A parameter within a step: the phase that its gradient and its update are in.

    phase       meaning                                                      left through
    IDLE        backward has not reached the parameter in this step          depart()
    TRAVELLING  the gradient is in the buffer and on its way; the tensor     arrive(), defer_update()
                in ``.grad`` is pending (pending.py)
    ARRIVED     ``.grad`` is what the ranks agree on, and nothing is         begin_step(), defer_update()
                pending; also during and after the update (of another thread:
                pending until that ends)
    UPDATE_DUE  step() was called; the parameter and ``.grad`` are pending   start_update()
                until the update runs, wherever the gradient is

A step goes IDLE, TRAVELLING, ARRIVED in hook mode, and IDLE, TRAVELLING, UPDATE_DUE, ARRIVED in overlap mode. An update
that fails puts the parameter back into UPDATE_DUE for good, so that every read of it raises.

The sum of an UPDATE_DUE parameter may have arrived or not. What is left to do when it arrives is therefore told by two
fields, ``copy_due`` and ``locally_unused``, in each phase alike.

Thread safety: autograd's threads while backward runs, otherwise under the session's lock.
"""

import dataclasses
import enum
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from gradcast.errors import Error, refused
from gradcast.training.compat import extension
from gradcast.training.step import pending

_NAMES_SHOWN = 3


class Phase(enum.Enum):
    """See the module docstring."""

    IDLE = enum.auto()
    TRAVELLING = enum.auto()
    ARRIVED = enum.auto()
    UPDATE_DUE = enum.auto()


@dataclasses.dataclass(frozen=True)
class LocallyUnused:
    """No backward pass of this step has used the parameter on this rank.

    ``grad_before``: the value of ``.grad`` before the step. It stays if no other rank has used the parameter either, or
    if some rank's backward pass has failed before it. ``was_view``: that value was in the buffer, and this is a copy.
    """

    grad_before: torch.Tensor | None
    was_view: bool


@dataclasses.dataclass(slots=True, eq=False)
class ParameterState:
    """A parameter and its gradient in the current step; ``index`` counts the session's parameters."""

    index: int
    name: str
    parameter: nn.Parameter
    phase: Phase = Phase.IDLE
    # The tensor that backward has put into .grad: the view of the buffer, or a tensor apart from the buffer.
    visible_grad: torch.Tensor | None = None
    update_grad: torch.Tensor | None = None  # what the update uses; None if no rank has used the parameter
    copy_due: bool = False  # the sum, when it has arrived, must be copied from the buffer into visible_grad
    locally_unused: LocallyUnused | None = None  # until the gradient has arrived
    # The update ran only when backward began: if forward has read the parameter after all, it read the old value.
    updated_late: bool = False
    zero_after_update: bool = False  # zero_grad(set_to_none=False) was called while the update was due
    frozen_steps: int = 0  # the last consecutive steps in which the parameter was frozen on all ranks
    forward_version: int | None = None  # tensor version at the end of forward, if the program hooks gradients
    owned: tuple[torch.Tensor, ...] = ()  # what the program's callbacks write after the update: pending as long

    @property
    def is_update_due(self) -> bool:
        return self.phase is Phase.UPDATE_DUE


def begin_step(states: list[ParameterState]) -> None:
    _enter(Phase.IDLE, states, Phase.IDLE, Phase.ARRIVED)


def depart(states: list[ParameterState], owner: pending.Owner | None) -> None:
    """The gradients are in the buffer. An unused parameter is pending, too: it may turn out to have no gradient.
    ``owner``: None if they are pending already."""
    _enter(Phase.TRAVELLING, states, Phase.IDLE)
    if owner is None:
        return
    native = extension.load()
    pending.mark(native.fields(states, "visible_grad"), owner)
    unused = native.with_field(states, "locally_unused", None, False)
    if unused:
        pending.mark(native.fields(unused, "parameter"), owner, gradients_known=False)


def arrive(states: list[ParameterState]) -> None:
    """The gradients have arrived and are in place. While an update is due, everything stays pending for that."""
    travelling = extension.load().with_field(states, "phase", Phase.TRAVELLING)
    _clear(travelling)
    _enter(Phase.ARRIVED, travelling, Phase.TRAVELLING)


def defer_update(states: list[ParameterState], owner: pending.Owner) -> None:
    """``step()`` was called, and the updates run later."""
    _enter(Phase.UPDATE_DUE, states, Phase.TRAVELLING, Phase.ARRIVED)
    pending.mark(_tensors(states, gradients=True), owner)


def start_update(states: list[ParameterState], *, hidden: bool = False) -> None:
    """The updates run now; the optimizer finds ordinary tensors. REQUIRES: the gradients have arrived.

    ``hidden``: instead everything stays pending for other threads, ``.grad`` of a parameter included, until
    end_hidden_update().
    """
    _enter(Phase.ARRIVED, states, Phase.UPDATE_DUE)
    if hidden:
        pending.ask_for_gradients(extension.load().fields(states, "parameter"))
    else:
        _clear(states)


def end_hidden_update(states: list[ParameterState]) -> None:
    _clear(states)


def fail_update(states: list[ParameterState], owner: pending.Owner) -> None:
    """The update has failed, perhaps half-way. ``owner`` raises for every later use of the parameters."""
    _enter(Phase.UPDATE_DUE, states, Phase.ARRIVED)
    pending.mark(_tensors(states, gradients=False), owner)


def release(states: list[ParameterState]) -> None:
    """Nothing waits any more, whatever the phase."""
    _clear(states)
    _enter(Phase.IDLE, states, *Phase)


def _enter(phase: Phase, states: list[ParameterState], *before: Phase) -> None:
    wrong = extension.load().change_fields(states, "phase", before, phase)
    if wrong is not None:
        raise Error(f"{wrong.name} is {wrong.phase.name} where that cannot be: a defect of gradcast", "internal")


def _tensors(states: list[ParameterState], *, gradients: bool) -> list[torch.Tensor | None]:
    native = extension.load()
    found = native.fields(states, "parameter")
    if gradients:
        found += native.fields(states, "visible_grad")
    owned = native.fields(states, "owned")
    return found + [tensor for each in owned for tensor in each] if any(owned) else found


def _clear(states: list[ParameterState]) -> None:
    pending.clear(_tensors(states, gradients=True))


class ParameterStates(list[ParameterState]):
    """All parameters of a session, by index and by the tensors that may be pending for them."""

    def __init__(self, states: Iterable[ParameterState]) -> None:
        super().__init__(states)
        self._by_tensor = {id(state.parameter): state for state in self}  # and by visible_grad and owned

    def of(self, tensor: torch.Tensor) -> ParameterState | None:
        """The parameter whose value or ``visible_grad`` the tensor is, or that the tensor is owned for."""
        return self._by_tensor.get(id(tensor))

    def set_visible_grad(self, state: ParameterState, tensor: torch.Tensor | None) -> None:
        """Sets the tensor that backward has put into ``.grad``."""
        if state.visible_grad is tensor:
            return
        self._by_tensor.pop(id(state.visible_grad), None)
        state.visible_grad = tensor
        if tensor is not None:
            self._by_tensor[id(tensor)] = state

    def set_owned(self, state: ParameterState, tensors: tuple[torch.Tensor, ...]) -> None:
        """REQUIRES: no update is due."""
        for tensor in state.owned:
            self._by_tensor.pop(id(tensor), None)
        state.owned = tensors
        for tensor in tensors:
            self._by_tensor[id(tensor)] = state

    def release(self) -> None:
        """Nothing waits any more, and no parameter or gradient is referred to."""
        release(self)
        for state in self:
            state.visible_grad = state.update_grad = None
        self._by_tensor.clear()
        self.clear()


def names(states: Sequence[ParameterState]) -> str:
    """For messages: "a, b, c and 5 more"."""
    return shown([state.name for state in states])


def shown(names_: Sequence[str]) -> str:
    """The same for names."""
    first = ", ".join(names_[:_NAMES_SHOWN])
    more = len(names_) - _NAMES_SHOWN
    return f"{first} and {more} more" if more > 0 else first


def second_gradient(state: ParameterState) -> Error:
    return refused(
        f"{state.name} got a second gradient while its first one was on the network, so both are lost; put all "
        "backward passes before step() but the last one under handle.no_sync(), and if the parameter is used in "
        "several checkpointed parts of the model, call checkpoint() with use_reentrant=False"
    )


def used_inside_backward(state: ParameterState) -> Error:
    return refused(
        f"a hook on {state.name} (register_post_accumulate_grad_hook) changed the parameter or removed its gradient "
        "inside backward, before the ranks' mean existed, so the ranks' parameters would differ; update after "
        "backward()"
    )


def stale_read(state: ParameterState) -> Error:
    return refused(
        f"{state.name} was used in forward before its update had run, so this gradient belongs to an old value: the "
        "module reads the parameter in a way that gradcast cannot see (a view or alias kept from an earlier step, "
        "DLPack, a scripted module). Call handle.flush() before forward, or attach without the optimizer (hook mode)"
    )
