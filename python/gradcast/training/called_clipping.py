"""Clip calls of the program, a framework's or a loop's, which gradcast carries out: they wait for nothing, and return a
norm that is pending until it is known."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from gradcast.errors import refused
from gradcast.training.compat.clip_calls import ClipCalls, missing
from gradcast.training.options import Clip
from gradcast.training.ranks.group import Group
from gradcast.training.sessions.kinds import TrainingSession

_log = logging.getLogger("gradcast")


class CalledClipping:
    """``session``: returns the present one. ``clip``: of its options. ``what``: the call, for messages. In all
    functions ``own`` is what the program has called, which waits for gradients."""

    def __init__(self, session: Callable[[], TrainingSession], clip: Clip, what: str) -> None:
        self._session, self._clip, self._what, self._told = session, clip, what, False

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
        return self._take(
            own, parameters, asked, lambda early, all_: early.clip(all_, refuse_nonfinite=refuse_nonfinite)
        )

    def value(self, own: Callable[[], Any], parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        asked = {"value": float(clip_value)}
        self._take(own, parameters, asked, lambda early, all_: early.clip(all_, refuse_nonfinite=False))

    @property
    def _early(self) -> Any:
        session = self._session()
        return None if session.released else session.early_clipping

    def _take(self, own: Callable, parameters: Iterable[torch.Tensor], asked: dict, clip: Callable) -> Any:
        """``clip``: carries the call out, given the session's early clipping and the parameters."""
        early, parameters = self._early, list(parameters)
        covers = None if early is None else early.covers(parameters)
        if covers is None:  # without gradcast's clipping, or another module's
            return own()
        different = [f"{name}={value:g}" for name, value in asked.items() if getattr(self._clip, name) != value]
        if covers and not different:
            return clip(early, parameters)
        how = f"with {' and '.join(different)}" if different else "by the norm of a part of the module's parameters"
        if self._clip.unasked:
            raise refused(
                f"{self._what} clips {how}, and the options of gradcast clip each step of the whole module with "
                f"{shown(self._clip)}; clip alike, or omit it from the options"
            )
        if not self._told and self._session().group.rank == 0:
            _log.warning(
                "%s clips %s, unlike the setting that gradcast has taken over: such calls wait for all gradients, "
                "without overlap with the next forward pass",
                self._what,
                how,
            )
        self._told = True
        return own()


class LoopClipping(CalledClipping):
    """The calls of torch's functions in the training loop: of ``clip_grad_norm_``, and of the two that it consists of,
    ``get_total_norm`` and ``clip_grads_with_norm_``, which torchtitan calls one after the other."""

    def concerns(self, tensors: Sequence[torch.Tensor]) -> bool:
        """True of parameters of this module, and of all its gradients."""
        early = self._early
        return early is not None and (early.covers(tensors) is not None or early.parameters_with(tensors) is not None)

    def on_call(self, name: str, own: Callable[[], Any], *given: Any, **named: Any) -> Any:
        """A listener of compat/clip_calls.py."""
        return getattr(self, f"_{name.strip('_')}")(own, *given, **named)

    def _clip_grad_norm(
        self, own: Callable, parameters: Any, max_norm: float, norm_type: float = 2.0,
        error_if_nonfinite: bool = False, foreach: bool | None = None,
    ) -> Any:  # fmt: skip
        return self.norm(own, parameters, max_norm, norm_type, error_if_nonfinite)

    def _clip_grad_value(self, own: Callable, parameters: Any, clip_value: float, foreach: bool | None = None) -> None:
        self.value(own, parameters, clip_value)

    def _get_total_norm(
        self, own: Callable, tensors: Any, norm_type: float = 2.0,
        error_if_nonfinite: bool = False, foreach: bool | None = None,
    ) -> Any:  # fmt: skip
        early = self._early
        parameters = early.parameters_with(tensors) if float(norm_type) == self._clip.norm_type else None
        norm = None
        if parameters is not None:
            norm = early.clip(parameters, refuse_nonfinite=error_if_nonfinite, clips=False)
        return own() if norm is None else norm

    def _clip_grads_with_norm(
        self, own: Callable, parameters: Any, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None
    ) -> None:
        asked = {"norm": float(max_norm)}
        self._take(own, parameters, asked, lambda early, all_: early.clip_by(total_norm, all_, own))


def loop_calls(session: Callable[[], TrainingSession], clip: Clip, group: Group) -> ClipCalls:
    """Carries out the loop's own clip calls, until its ``remove``."""
    if unknown := missing():
        group.warning(
            "torch %s has another %s, whose calls gradcast does not notice: omit them from the loop, since "
            "options.clip clips each step",
            torch.__version__,
            unknown[0],
        )
    loop = LoopClipping(session, clip, "the loop's clip call")
    return ClipCalls(loop.concerns, loop.on_call)


def shown(clip: Clip) -> str:
    """The settings that differ from the defaults."""
    usual = vars(Clip())
    return f"Clip({', '.join(f'{name}={each:g}' for name, each in vars(clip).items() if each != usual[name])})"
