"""Unions of time intervals. Pure."""

import math
from collections.abc import Iterable


def busy_periods_ns(intervals: Iterable[tuple[float, float]]) -> list[float]:
    """Lengths of the periods that the intervals cover together, in order of time.

    ``intervals``: (begin, end), in any order. Intervals that touch or overlap belong to one period.
    """
    lengths_ns: list[float] = []
    busy_until_ns = -math.inf
    for begin_ns, end_ns in sorted(intervals):
        if begin_ns > busy_until_ns:
            lengths_ns.append(end_ns - begin_ns)
        else:
            lengths_ns[-1] += max(0, end_ns - busy_until_ns)
        busy_until_ns = max(busy_until_ns, end_ns)
    return lengths_ns
