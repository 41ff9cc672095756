"""A parameter and the state of its gradient in the current step."""

from collections.abc import Sequence

from torch import nn

from gradcast.errors import Error

_NAMES_SHOWN = 3


class Slot:
    __slots__ = ("index", "name", "owner", "parameter", "ready", "stale", "updating", "zero_after")

    def __init__(self, index: int, name: str, parameter: nn.Parameter, owner: int | None) -> None:
        self.index = index
        self.name = name
        self.parameter = parameter
        self.owner = owner  # the number of its optimizer, None in hook mode
        self.ready = False  # its gradient is on its way, or has arrived
        self.updating = False  # step() was called and its update has not run
        self.stale = False  # the last forward pass did not read it, as far as gradcast saw
        self.zero_after = False  # zero_grad(set_to_none=False) came before its update


def names(slots: Sequence[Slot]) -> str:
    """For messages: "a, b, c and 5 more"."""
    shown = ", ".join(slot.name for slot in slots[:_NAMES_SHOWN])
    more = len(slots) - _NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def missing_gradient(slots: Sequence[Slot]) -> Error:
    few = "parameter has" if len(slots) == 1 else "parameters have"
    return Error(
        f"{len(slots)} {few} no gradient in this step: {names(slots)}; gradcast needs a gradient of every parameter "
        "that was trainable at attach. Freeze what the loss does not use (requires_grad_(False)) before attach",
        "invalid_use",
    )


def stale_read(slot: Slot) -> Error:
    return Error(
        f"{slot.name} was used in forward before its update had run, so this gradient belongs to an old value: the "
        "module reads it in a way that gradcast cannot see (a view or alias kept from an earlier step, DLPack, a "
        "scripted module). Call handle.flush() before forward, or attach without the optimizer (hook mode)",
        "invalid_use",
    )
