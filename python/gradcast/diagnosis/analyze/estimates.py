"""A measured number with the interval that its samples leave open.

Pure: numbers in, numbers out. Thread safety: pure; any thread.
"""

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_RESAMPLES = 400
_TAIL = 0.025  # on each side: 95 % lie between


@dataclass(frozen=True)
class Estimate:
    """In the unit of its samples. ``low`` and ``high`` hold 95 %."""

    value: float
    low: float
    high: float

    def fields(self) -> dict[str, float]:
        return {"ms": self.value, "low_ms": self.low, "high_ms": self.high}


def estimate(function: Callable[..., float], *samples: Sequence[float]) -> Estimate:
    """``function`` of the samples, each a list of independent measurements, with a bootstrap interval.

    Each list is drawn from anew, with replacement (B. Efron, *Bootstrap methods: another look at the jackknife*, Annals
    of Statistics 7, 1979, percentile method). The draws are the same in every run. REQUIRES: no list is empty.
    """
    chance = random.Random(0)
    drawn = sorted(function(*(chance.choices(each, k=len(each)) for each in samples)) for _ in range(_RESAMPLES))
    cut = round(_TAIL * _RESAMPLES)
    value = function(*samples)
    return Estimate(value, min(value, drawn[cut]), max(value, drawn[-1 - cut]))


def median(samples: Sequence[float]) -> Estimate:
    return estimate(statistics.median, samples)
