"""Clipping that the program asks for between backward and ``step()``, as frameworks do that clip by themselves.

Nothing waits there. The gradients are clipped when they are first used: by a deferred update, which waits for all only
if the norm is not certified (clipping.py), by ``step()``, or by the program. The norm is a pending tensor until then.
"""

import threading
from collections.abc import Callable, Sequence

import torch
from torch import nn

from gradcast.training.compat.sharding import local_of, whole_of
from gradcast.training.measure.early_waits import Cause
from gradcast.training.options import Options
from gradcast.training.step.clipping import NormClipping, ValueClipping, clip_as_torch
from gradcast.training.step.optimizer_steps import OptimizerSteps


class EarlyClipping:
    """The early clipping of one session, with its lock. ``use_gradients``: waits for gradients that the program uses
    between backward and ``step()``."""

    def __init__(
        self, options: Options, steps: OptimizerSteps, lock: threading.RLock, use_gradients: Callable[[], None]
    ) -> None:
        self._options, self._steps, self._gradients = options, steps, steps.gradients
        self._states, self._clipping = self._gradients.states, self._gradients.clipping or steps.clipping.values
        self._lock, self._use_gradients = lock, use_gradients

    def covers(self, parameters: Sequence[torch.Tensor]) -> bool | None:
        """Returns whether these are all that the options clip together; None if they are others. Values of some
        parameters may be clipped before those of others, so any of them count as all."""
        found = [self._gradients.table.of(parameter) for parameter in parameters]
        known = [state for state in found if state is not None]
        if not known:
            return None
        if isinstance(self._clipping, ValueClipping):
            return True
        others = [each for each, state in zip(parameters, found, strict=True) if state is None]
        once = len(known) == len(self._states) == len(set(map(id, known)))
        # Of a sharded parameter this rank may have no element.
        return once and not any(each.grad is not None and local_of(each.grad).numel() for each in others)

    def clip(
        self, parameters: Sequence[torch.Tensor], *, refuse_nonfinite: bool, clips: bool = True
    ) -> torch.Tensor | None:
        """Clips gradients when they are first used. Returns the norm, which may be pending; None if values are clipped.
        REQUIRES: these are all parameters (``covers``).

        ``refuse_nonfinite``: if the norm is NaN or inf, whatever uses the gradients first raises. ``clips``: otherwise
        the program asks for the norm of all gradients only.
        """
        with self._lock:
            gradients, clipping = self._gradients, self._clipping
            if gradients.open and (clipping.asked or clipping.request or clipping.done or not gradients.all_sent):
                self._use_gradients()
            if not gradients.open or gradients.values_used or not gradients.are_in_place(self._states):
                if clips:
                    return self._clip_now(parameters, refuse_nonfinite)
                self._agree()
                return None
            if isinstance(clipping, ValueClipping):
                clipping.asked = True
                return None
            return clipping.ask(parameters, refuse_nonfinite, self._finish, clips=clips)

    def parameters_with(self, gradients: Sequence[torch.Tensor]) -> list[nn.Parameter] | None:
        """The parameters with these gradients, if they are all that the options clip together by their norm."""
        if not isinstance(self._clipping, NormClipping):
            return None
        owners = {id(each.grad): each for each in self._clipping.parameters if each.grad is not None}
        found = [owners[id(each)] for each in gradients if id(each) in owners]
        return found if len(found) == len(gradients) and self.covers(found) else None

    def clip_by(self, norm: torch.Tensor, parameters: Sequence[torch.Tensor], own: Callable[[], None]) -> None:
        """Clips by a norm that ``clip`` has returned without clipping, or, at once by ``own``, by another one.
        REQUIRES: these are all parameters (``covers``)."""
        with self._lock:
            request = self._clipping.request
            if request is None or request.norm is not norm:
                own()
                self._clipping.done = self._gradients.open
            elif request.is_answered:
                self._clip_now(parameters, False)
            else:
                request.clips = True

    def _clip_now(self, parameters: Sequence[torch.Tensor], refuse_nonfinite: bool) -> torch.Tensor | None:
        """Clips at once: the program has used or replaced the gradients, or they are not in flight."""
        clipping = self._clipping
        self._agree()
        norm = clip_as_torch(self._options, parameters, refuse_nonfinite)
        if self._gradients.open:
            clipping.done = True
            if isinstance(clipping, NormClipping):
                clipping.total_norm = whole_of(norm)
        return norm

    def _agree(self) -> None:
        """Tells other shards, if there are any, that this rank waits for its gradients in this step."""
        if self._gradients.open and isinstance(self._clipping, NormClipping):
            self._clipping.agree(defers=False)

    def _finish(self) -> None:
        """Clips, since the program uses the norm."""
        with self._lock, self._steps.waits.at(Cause.NORM):
            self._steps.complete_all_updates()
            if isinstance(self._clipping, NormClipping):
                self._clipping.receive_norm()
                if self._clipping.is_promised:
                    self._gradients.passes.refuse_inside()
                    self._use_gradients()
