"""A framework's own clipping, carried out by gradcast: its clip call waits for nothing, and returns a pending norm."""

import dataclasses
import logging
import math
from collections.abc import Callable
from typing import Any

import gradcast
from gradcast.errors import refused
from gradcast.training.called_clipping import CalledClipping, shown
from gradcast.training.state import TrainingState

_log = logging.getLogger("gradcast")


class _OnCall(gradcast.Clip):
    """Clipping of the steps before which the framework's clip call has come."""

    unasked = False


def with_clipping(
    options: gradcast.Options | None, setting: str, *, norm: float | None = None, value: float | None = None
) -> gradcast.Options:
    """Options that clip as the framework's ``setting`` says. Raises Error(invalid_use) if they clip otherwise."""
    options = options or gradcast.Options()
    if any(each is not None and not 0 < each < math.inf for each in (norm, value)):
        return options  # the framework's own call does then what it does without gradcast
    asked = _OnCall(norm=norm, value=value)
    if not options.clips:
        return dataclasses.replace(options, clip=asked)
    if vars(options.clip) != vars(asked):
        raise refused(
            f"{setting}, and the options of gradcast have {shown(options.clip)}; give both the same, or one only"
        )
    return options


class ClipCalls(CalledClipping):
    """A framework's clip calls while ``handle`` is attached."""

    def __init__(self, handle: gradcast.Handle, options: gradcast.Options | None) -> None:
        training, clip = TrainingState.of(handle, "ClipCalls"), (options or gradcast.Options()).clip
        super().__init__(lambda: training.session, clip, "the framework's clip call")


def replace(holder: Any, **functions: Callable) -> None:
    """Replaces methods of one object."""
    vars(holder).update(functions)


def give_back(holder: Any, *names: str) -> None:
    for name in names:
        vars(holder).pop(name, None)


def tell_scaler(setting: str) -> None:
    """Logs why the framework's own clipping stays."""
    _log.warning(
        "%s is left to the framework, because a GradScaler drives the optimizer: steps wait for all gradients", setting
    )
