"""A measured value with its 95 % confidence interval."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_RESAMPLES = 400
_TAIL = 0.025  # on each side, which leaves 95 %


@dataclass(frozen=True)
class Estimate:
    """A value in the unit of its samples, and its 95 % interval from ``low`` to ``high``."""

    value: float
    low: float
    high: float

    def fields(self) -> dict[str, float]:
        return {"ms": self.value, "low_ms": self.low, "high_ms": self.high}


def estimate(function: Callable[..., float], *samples: Sequence[float]) -> Estimate:
    """Applies ``function`` to the samples, and estimates its interval by bootstrap.

    Each argument of ``function`` is a list of independent measurements. Each list is resampled with replacement (B.
    Efron, *Bootstrap methods: another look at the jackknife*, Annals of Statistics 7, 1979, percentile method). The
    random draws are the same in every run. REQUIRES: no list is empty.
    """
    chance = random.Random(0)
    drawn = sorted(function(*(chance.choices(each, k=len(each)) for each in samples)) for _ in range(_RESAMPLES))
    cut = round(_TAIL * _RESAMPLES)
    value = function(*samples)
    return Estimate(value, min(value, drawn[cut]), max(value, drawn[-1 - cut]))
