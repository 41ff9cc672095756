"""Arranges events so that they fit on lanes. Pure."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def in_lanes(items: Sequence[T], ends: Callable[[T], tuple[float, float]]) -> list[list[T]]:
    """Distributes the items over as few lanes as possible without overlap; each goes to the first free lane."""
    lanes: list[list[T]] = []
    for item in sorted(items, key=ends):
        start = ends(item)[0]
        free = next((lane for lane in lanes if ends(lane[-1])[1] <= start), None)
        if free is None:
            lanes.append([item])
        else:
            free.append(item)
    return lanes


def nested(spans: Sequence[Any]) -> list[Any]:
    """Cuts spans (named tuples with ``start_ns`` and ``end_ns``) so that each lies inside or outside of every other.

    Clocks are read one after the other, so a wait inside forward may seem to end some microseconds after it.
    """
    open_ends: list[float] = []
    cut = []
    for span in sorted(spans, key=lambda each: (each.start_ns, -each.end_ns)):
        while open_ends and open_ends[-1] <= span.start_ns:
            open_ends.pop()
        end_ns = min(span.end_ns, open_ends[-1]) if open_ends else span.end_ns
        open_ends.append(end_ns)
        cut.append(span._replace(end_ns=end_ns))
    return cut
