"""A parameter and the state of its gradient in the current step."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn

from gradcast.errors import Error

_NAMES_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Absence:
    """No backward pass of this step has used the parameter here. ``gradient``: what its ``.grad`` was, which it stays
    if no other rank has used it either, or some rank's pass has failed before. ``in_view``: that was in the buffer, and
    this is a copy."""

    gradient: torch.Tensor | None
    in_view: bool


class ParameterState:
    __slots__ = (
        "absence",
        "exposed",
        "frozen_steps",
        "gradient",
        "index",
        "name",
        "owed",
        "owner",
        "parameter",
        "ready",
        "stale",
        "updating",
        "version",
        "zero_after",
    )

    def __init__(self, index: int, name: str, parameter: nn.Parameter, owner: int | None) -> None:
        self.index = index
        self.name = name
        self.parameter = parameter
        self.absence: Absence | None = None  # until the gradient has arrived
        self.exposed: torch.Tensor | None = None  # what backward has made .grad: the view, or memory apart from it
        self.owed = False  # the sum that has arrived still has to be copied into ``exposed``
        self.gradient: torch.Tensor | None = None  # what its update uses; None: nobody has used it
        self.frozen_steps = 0  # in a row, lately, on all ranks
        self.version: int | None = None  # of the parameter when forward ended, where hooks of the program's wait for it
        self.owner = owner  # the number of its optimizer, None in hook mode
        self.ready = False  # its gradient is on its way, or has arrived
        self.updating = False  # step() was called and its update has not run
        self.stale = False  # the last forward pass did not read it, as far as gradcast saw
        self.zero_after = False  # zero_grad(set_to_none=False) came before its update


def names(slots: Sequence[ParameterState]) -> str:
    """For messages: "a, b, c and 5 more"."""
    shown = ", ".join(slot.name for slot in slots[:_NAMES_SHOWN])
    more = len(slots) - _NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def second_gradient(slot: ParameterState) -> Error:
    return Error(
        f"{slot.name} got a second gradient while its first one was on the network, so both are lost; put all backward "
        "passes before step() but the last one under handle.no_sync(), and if the parameter is used in several "
        "checkpointed parts of the model, call checkpoint() with use_reentrant=False",
        "invalid_use",
    )


def used_inside_backward(slot: ParameterState) -> Error:
    return Error(
        f"{slot.name} was changed, or its gradient taken away, inside backward by a hook on it "
        "(register_post_accumulate_grad_hook), before the ranks' mean existed, so the ranks' parameters would differ; "
        "update after backward()",
        "invalid_use",
    )


def stale_read(slot: ParameterState) -> Error:
    return Error(
        f"{slot.name} was used in forward before its update had run, so this gradient belongs to an old value: the "
        "module reads it in a way that gradcast cannot see (a view or alias kept from an earlier step, DLPack, a "
        "scripted module). Call handle.flush() before forward, or attach without the optimizer (hook mode)",
        "invalid_use",
    )
