"""Comparison, from time to time, of one parameter's update by itself with that of the whole step.

The trial at attach cannot show what an optimizer does later (noise after a burn-in) or with rare gradients (a clip by
the norm of all). So some steps are not divided: an early one, some from then on, those whose gradients are much larger
or smaller than before, and one after updates that have drawn random numbers. In such a step the optimizer first updates
one parameter alone, which then gets its former value back.

Thread safety: under the session's lock.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from gradcast.errors import refused
from gradcast.training.compat import extension
from gradcast.training.compat.sharding import local_of
from gradcast.training.step.parameter_state import ParameterState
from gradcast.training.step.partial_step import PartialStep

_FIRST = 20
_EVERY = 200  # steps
_OUTLIER = 8.0  # times as large, or as small
_STEPS_BETWEEN = 10  # at least, between two steps that are compared because something is odd
_ELEMENTS_MAX = 1 << 16  # of the parameter, if there is a smaller one; else one of the smallest
_LARGE = 8  # of so many
# More than rounding: of the update, and of the value in units of its last place.
_OF_UPDATE, _OF_VALUE = 1e-3, 4


class PartComparison:
    """The comparisons of one optimizer's steps. ``states``: its parameters. ``tell``: logs a message once."""

    def __init__(self, states: Sequence[ParameterState], tell: Callable[..., None]) -> None:
        self._tell = tell
        self._on_device = any(state.parameter.is_cuda for state in states)
        self._steps, self._last, self._count = 0, 0, 0
        self._norms: dict[int, float] = {}  # by parameter: of its gradient, when that was looked at last
        self._watched: int | None = None  # the parameter whose gradient is looked at, while it is known in time
        self._is_possible, self._draws = True, False

    def run_watched(self, run: Callable[[], None]) -> None:
        """Runs the update of a part, and notes whether random numbers were drawn, perhaps by another thread."""
        before = self._random_positions()
        run()
        self._draws = self._draws or self._random_positions() != before

    def _random_positions(self) -> list[Any]:
        """Positions of the generators that optimizers draw from by default. The host knows that of a device's, too."""
        positions = [extension.load().random_position()]
        if self._on_device:
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            positions.append(generator.get_state().tolist())
        return positions

    def is_due(self, arrived: Sequence[ParameterState]) -> bool:
        """Returns whether the step that begins shall be compared. Call it once per step. ``arrived``: parameters whose
        gradients are known; on a device none, so that the host need not wait."""
        self._steps += 1
        is_odd = (self._is_outlier(arrived) or self._draws) and self._steps - self._last >= _STEPS_BETWEEN
        return self._is_possible and (self._steps == _FIRST or self._steps % _EVERY == 0 or is_odd)

    def _is_outlier(self, arrived: Sequence[ParameterState]) -> bool:
        with torch._C.DisableTorchFunctionSubclass():  # gradients are pending
            known = extension.load().with_update(arrived)
            indices = extension.load().indices_of(known)
            if self._watched not in indices:
                with_values = [state for state in known if local_of(state.update_grad).numel() > 0]
                if not with_values:
                    return False
                self._watched = min(with_values, key=lambda state: local_of(state.update_grad).numel()).index
            norm = torch.linalg.vector_norm(local_of(known[indices.index(self._watched)].update_grad)).item()
        before = self._norms.setdefault(self._watched, norm)
        self._norms[self._watched] = norm
        return not before / _OUTLIER <= norm <= before * _OUTLIER

    def run(self, partial: PartialStep, parameters: Sequence[nn.Parameter], run_all: Callable[[], None]) -> None:
        """Calls ``run_all``, which updates these parameters, all of the optimizer, from their ``.grad``. Raises
        Error(invalid_use) if one of them would get another value alone."""
        self._last, self._draws = self._steps, False
        parameter = self._chosen(parameters)
        try:
            alone, before = partial.updated_alone(parameter), parameter.detach().clone()
        except Exception as error:
            self._is_possible = False
            self._tell(
                "%s does not update a parameter alone (%s: %s), so during training its updates in parts are not "
                "compared with whole steps",
                partial.name,
                type(error).__name__,
                error,
            )
            run_all()
            return
        run_all()
        if not _is_same(*map(local_of, (parameter.detach(), alone, before))):
            raise refused(
                f"{partial.name} gives a parameter of shape {tuple(parameter.shape)} another value alone than in a "
                "whole step: by now it looks at all gradients together, or draws random numbers, so it cannot update "
                "in parts while gradients arrive, and earlier steps may have been wrong; use hook mode: "
                "gradcast.attach(module) without the optimizer"
            )

    def _chosen(self, parameters: Sequence[nn.Parameter]) -> nn.Parameter:
        """A parameter, another one each time; seldom the first, which draws the same random numbers alone."""
        self._count += 1
        small = [each for each in parameters if each.numel() <= _ELEMENTS_MAX]
        small = small or heapq.nsmallest(_LARGE, parameters, key=torch.Tensor.numel)
        return small[self._count % len(small)]


def _is_same(together: torch.Tensor, alone: torch.Tensor, before: torch.Tensor) -> bool:
    """Returns whether the two values differ by rounding at most."""
    if torch.equal(together, alone):
        return True
    if not torch.equal(together.isnan(), alone.isnan()):
        return False
    values = [each.nan_to_num().double() for each in (together, alone, before)]
    update, difference = (values[0] - values[2]).abs().max(), (values[0] - values[1]).abs().max()
    return bool(difference <= _OF_UPDATE * update + _OF_VALUE * torch.finfo(before.dtype).eps * values[2].abs().max())
