"""A framework's own clipping, carried out by gradcast: its clip call waits for nothing, and returns a pending norm."""

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

import gradcast
from gradcast.errors import refused
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
            f"{setting}, and the options of gradcast have {_shown(options.clip)}; give both the same, or one only"
        )
    return options


class ClipCalls:
    """A framework's clip calls while ``handle`` is attached. ``own``: its own function, which waits for gradients."""

    def __init__(self, handle: gradcast.Handle, options: gradcast.Options | None) -> None:
        self._training, self._own = TrainingState.of(handle, "ClipCalls"), (options or gradcast.Options()).clip
        self._told = False

    def norm(
        self,
        own: Callable[[], Any],
        parameters: Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        refuse_nonfinite: bool = False,
    ) -> Any:
        """Replaces ``clip_grad_norm_``. Returns the norm, which waits where it is read."""
        asked = {"norm": float(max_norm), "norm_type": float(norm_type)}
        return self._clip(own, parameters, asked, refuse_nonfinite)

    def value(self, own: Callable[[], Any], parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        self._clip(own, parameters, {"value": float(clip_value)}, False)

    def _clip(self, own: Callable, parameters: Iterable[torch.Tensor], asked: dict, refuse_nonfinite: bool) -> Any:
        session, parameters = self._training.session, list(parameters)
        early = None if session.released else session.early_clipping
        covers = None if early is None else early.covers(parameters)
        if covers is None:  # without gradcast's clipping, or another module's
            return own()
        different = [f"{name}={value:g}" for name, value in asked.items() if getattr(self._own, name) != value]
        if covers and not different:
            return early.clip(parameters, refuse_nonfinite=refuse_nonfinite)
        how = f"with {' and '.join(different)}" if different else "by the norm of a part of the module's parameters"
        if self._own.unasked:
            raise refused(
                f"the framework's clip call clips {how}, and the options of gradcast clip each step of the whole "
                f"module with {_shown(self._own)}; clip alike, or omit it from the options"
            )
        if not self._told and session.group.rank == 0:
            _log.warning(
                "the framework's clip call clips %s, unlike the setting that gradcast has taken over: such calls wait "
                "for all gradients, without overlap with the next forward pass",
                how,
            )
        self._told = True
        return own()


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


def _shown(clip: gradcast.Clip) -> str:
    usual = vars(gradcast.Clip())
    return f"Clip({', '.join(f'{name}={each:g}' for name, each in vars(clip).items() if each != usual[name])})"
