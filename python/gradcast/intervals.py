"""Unions of time intervals. Pure."""

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T", int, float)


def busy_periods_ns(intervals: Iterable[tuple[float, float]]) -> list[float]:
    """Lengths of the periods that the intervals cover together, in order of time. ``intervals``: see ``united``."""
    return [end_ns - begin_ns for begin_ns, end_ns in united(intervals)]


def united(intervals: Iterable[tuple[T, T]]) -> list[tuple[T, T]]:
    """The periods that the intervals cover together, in order of time.

    ``intervals``: (begin, end), in any order. Intervals that touch or overlap belong to one period.
    """
    periods: list[tuple[T, T]] = []
    for begin, end in sorted(intervals):
        if periods and begin <= periods[-1][1]:
            periods[-1] = (periods[-1][0], max(periods[-1][1], end))
        else:
            periods.append((begin, end))
    return periods
