"""A parameter within a step: the phase that its gradient and its update are in.

    phase       meaning                                                      left through
    IDLE        backward has not reached the parameter in this step          GradientTable.place()
    SENT        the gradient is in the buffer, handed to the engine; the     arrive(), defer_update()
                tensor in ``.grad`` is pending (pending.py)
    ARRIVED     ``.grad`` is the value that ranks agree on, nothing is       begin_step(), defer_update()
                pending; also during and after the update (of another thread:
                pending until that ends)
    UPDATE_DUE  step() was called; the parameter and ``.grad`` are pending   start_update()
                until the update runs, wherever the gradient is

A step goes IDLE, SENT, ARRIVED in hook mode, and IDLE, SENT, UPDATE_DUE, ARRIVED in overlap mode. An update
that fails puts the parameter back into UPDATE_DUE for good, so that every read of it raises.

The sum of an UPDATE_DUE parameter may have arrived or not. Two fields, ``copy_due`` and ``locally_unused``, therefore
say in each phase alike what is left to do when it arrives.

Thread safety: autograd's threads while backward runs, otherwise under the session's lock.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from gradcast.errors import Error, refused
from gradcast.training.compat import extension
from gradcast.training.step import pending

_NAMES_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class LocallyUnused:
    """The mark of a parameter that no backward pass of this step has used on this rank.

    ``grad_before``: the value of ``.grad`` before the step. It stays if no other rank has used the parameter either, or
    if some rank's backward pass has failed before it. ``was_view``: that value was in the buffer, and this is a copy.
    """

    grad_before: torch.Tensor | None
    was_view: bool


class ParameterState(Protocol):
    """A parameter and its gradient in the current step. A C++ object of the session's GradientTable.

    ``index``: counts the session's parameters. ``visible_grad``: the tensor that backward has put into ``.grad``: the
    view of the buffer, or a tensor with memory of its own. ``update_grad``: the input of the update; None if no rank
    has used the parameter. ``copy_due``: the sum, when it has arrived, must be copied from the buffer into
    ``visible_grad``. ``locally_unused``: until the gradient has arrived; None if this rank has used the parameter.
    ``updated_late``: the update ran only when backward began; a forward pass that has read the parameter after all has
    read the old value. ``zero_after_update``: zero_grad(set_to_none=False) was called while the update was pending.
    ``frozen_steps``: the last consecutive steps in which the parameter was frozen on all ranks. ``forward_version``:
    the tensor's version at the end of forward, if the program hooks gradients. ``owned``: tensors that the program's
    callbacks write after the update: pending as long as the parameter.
    """

    index: int
    name: str
    parameter: nn.Parameter
    phase: Any
    is_update_due: bool
    visible_grad: torch.Tensor | None
    update_grad: torch.Tensor | None
    copy_due: bool
    locally_unused: LocallyUnused | None
    updated_late: bool
    zero_after_update: bool
    frozen_steps: int
    forward_version: int | None
    owned: tuple[torch.Tensor, ...]


def begin_step(table: Any, timed: Callable[[int], None] | None) -> None:
    """Begins a step. ``timed``: called with the index of each gradient before it is sent."""
    _check(table.begin_step(timed))


def arrive(states: Sequence[ParameterState]) -> None:
    """Notes gradients that have arrived and are in place. During a pending update everything stays pending for that."""
    pending.clear(extension.load().arrive(states))


def defer_update(states: Sequence[ParameterState], owner: pending.Owner) -> None:
    """Makes updates pending: ``step()`` was called, and they run later."""
    phase = extension.load().Phase
    _enter(phase.UPDATE_DUE, states, phase.SENT, phase.ARRIVED)
    pending.mark(extension.load().tensors_of(states, gradients=True), owner)


def start_update(states: Sequence[ParameterState], *, hidden: bool = False) -> None:
    """Begins the updates, which run now; the optimizer finds ordinary tensors. REQUIRES: the gradients have arrived.

    ``hidden``: instead everything stays pending for other threads, ``.grad`` of a parameter included, until
    end_hidden_update().
    """
    native = extension.load()
    _enter(native.Phase.ARRIVED, states, native.Phase.UPDATE_DUE)
    if hidden:
        pending.ask_for_gradients(native.parameters_of(states))
    else:
        _clear(states)


def end_hidden_update(states: Sequence[ParameterState]) -> None:
    _clear(states)


def fail_update(states: Sequence[ParameterState], owner: pending.Owner) -> None:
    """Notes an update that has failed, perhaps half-way. ``owner`` raises for every later use of the parameters."""
    phase = extension.load().Phase
    _enter(phase.UPDATE_DUE, states, phase.ARRIVED)
    pending.mark(extension.load().tensors_of(states, gradients=False), owner)


def release(states: Sequence[ParameterState]) -> None:
    """Ends all waits, whatever the phase."""
    _clear(states)
    phase = extension.load().Phase
    _enter(phase.IDLE, states, *phase.__members__.values())


def _enter(phase: Any, states: Sequence[ParameterState], *before: Any) -> None:
    _check(extension.load().enter(states, phase, before))


def _check(wrong: ParameterState | None) -> None:
    if wrong is not None:
        raise Error(f"{wrong.name} is {wrong.phase.name} where that cannot be: a defect of gradcast", "internal")


def _clear(states: Sequence[ParameterState]) -> None:
    pending.clear(extension.load().tensors_of(states, gradients=True))


def names(states: Sequence[ParameterState]) -> str:
    """Names for messages: "a, b, c and 5 more"."""
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
