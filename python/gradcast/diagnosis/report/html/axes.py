"""Figures: their frame, scales, axes and marks. They are drawn 960 wide, and scale with the page."""

import math
from collections.abc import Sequence
from typing import Any

from gradcast.diagnosis.report.html.markup import Markup, element

WIDTH = 960.0
LEFT, RIGHT = 96.0, 20.0
LETTER = 6.6  # approximate width of a letter in a figure


class Scale:
    def __init__(self, low: float, high: float, start: float = LEFT, end: float = WIDTH - RIGHT, log: bool = False):
        self._log = log
        self._low, self._high = self._value(low), self._value(high)
        if self._high <= self._low:
            self._high = self._low + 1
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        share = (self._value(value) - self._low) / (self._high - self._low)
        return self.start + share * (self.end - self.start)

    def _value(self, value: float) -> float:
        # A value of 0 is drawn at the edge.
        return math.log10(max(value, 1e-9)) if self._log else value


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Returns about ``about`` round numbers from low to high, in steps of 1, 2 or 5 times a power of ten."""
    span = max(high - low, 1e-12)
    rough = span / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def figure(height: float, label: str, caption: Any, *drawn: Any) -> Markup:
    """``label`` is the text that a screen reader reads."""
    return element("figure", svg(height, label, *drawn), element("figcaption", caption))


def svg(height: float, label: str, *drawn: Any, width: float = WIDTH) -> Markup:
    size = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {width:g} {height:g}"}
    return element("svg", element("title", label), *drawn, **size, role="img", aria_label=label)


def text(x: float, y: float, words: Any, anchor: str | None = None, class_: str | None = None) -> Markup:
    return element("text", words, x=x, y=y, text_anchor=anchor, class_=class_)


def numbers(values: Sequence[float]) -> list[tuple[float, str]]:
    return [(value, f"{value:g}") for value in values]


def below(x: Scale, across: Sequence[tuple[float, Any]], y: float, unit: str) -> list[Markup]:
    """Draws texts below a figure, and the unit at the end. ``across`` are values with their texts."""
    made = [text(x(value), y + 16, words, "middle", "tick") for value, words in across]
    return [*made, text(x.end, y + 34, unit, "end", "tick")]


def bottom_axis(x: Scale, values: Sequence[float], y: float, top: float, unit: str) -> list[Markup]:
    lines = [line(x(value), top, x(value), y, "grid") for value in values]
    return [*lines, *below(x, numbers(values), y, unit)]


def frame(
    x: Scale, y: Scale, across: Sequence[tuple[float, Any]], upwards: Sequence[tuple[float, Any]], unit: str
) -> list[Markup]:
    """Draws horizontal grid lines with their texts, and the texts ``below`` the figure."""
    lines = [line(x.start, y(value), x.end, y(value), "grid") for value, _ in upwards]
    names = [text(x.start - 8, y(value) + 4, words, "end", "tick") for value, words in upwards]
    return [*lines, *names, *below(x, across, y.start, unit)]


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def curve(points: Sequence[tuple[float, float]], class_: str, shape: str = "polyline") -> Markup:
    return element(shape, points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), class_=class_)


def bar(x: float, y: float, width: float, height: float, tooltip: str, class_: str) -> Markup:
    return element("rect", element("title", tooltip), x=x, y=y, width=max(width, 0.5), height=height, class_=class_)


def dot(x: float, y: float, tooltip: str, class_: str, radius: float = 4.0) -> Markup:
    return element("circle", element("title", tooltip), cx=x, cy=y, r=radius, class_=class_)
