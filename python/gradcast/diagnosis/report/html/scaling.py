"""Predicted scaling: efficiency with its band, its knee, and numbers of workers worth trying."""

from typing import Any

from gradcast.diagnosis.report.html import axes, components, values
from gradcast.diagnosis.report.html.axes import LEFT, WIDTH, Scale
from gradcast.diagnosis.report.html.markup import Markup, element
from gradcast.diagnosis.runs import BASES

_HEIGHT = 330.0
_BASIS = dict(zip(BASES, ("measured", "from fitted costs", "extrapolated"), strict=True))

_Points = list[dict[str, Any]]


def draw(run: dict[str, Any]) -> list[Markup]:
    scaling = run["scaling"]
    curves = _curves(scaling["points"])
    workers = sorted({point["workers"] for point in scaling["points"]})
    x, y = Scale(min(workers), max(workers), LEFT, WIDTH - 170, log=True), Scale(0, 1.05, _HEIGHT - 46, 14)
    shares = [(share / 100, f"{share} %") for share in (0, 25, 50, 75, 100)]
    drawn = axes.frame(x, y, [(count, count) for count in workers], shares, "workers")
    knee = scaling.get("knee_workers")
    if knee is not None and knee > 1:  # one worker is left of the first point
        drawn.append(axes.line(x(knee), 14, x(knee), y.start, "reference"))
        drawn.append(axes.text(x(knee) + 6, y.start - 8, f"knee: {knee}", class_="tick"))
    drawn += [_curve(index % 4, name, points, x, y) for index, (name, points) in enumerate(curves.items())]
    drawn += _names(curves, y)
    label = f"Scaling efficiency over workers, {values.plural(len(curves), 'network')}, with the band to expect."
    return [axes.figure(_HEIGHT, label, _caption(scaling), drawn), _table(scaling["points"])]


def _curves(points: _Points) -> dict[str, _Points]:
    found: dict[str, _Points] = {}
    for point in points:
        found.setdefault(f"{point['network']}, {point['algorithm']}", []).append(point)
    return found


def band(point: dict[str, Any]) -> tuple[float, float]:
    """Returns the efficiency at the long and at the short end of the step's interval."""
    at_1_ms = point["efficiency"] * point["step_ms"]
    return at_1_ms / point["high_ms"], min(at_1_ms / point["low_ms"], 1.05)


def _curve(colour: int, name: str, points: _Points, x: Scale, y: Scale) -> Markup:
    def places(shares: list[float]) -> list[tuple[float, float]]:
        return [(x(point["workers"]), y(share)) for point, share in zip(points, shares, strict=True)]

    middle = places([point["efficiency"] for point in points])
    lower, upper = (places(list(ends)) for ends in zip(*map(band, points), strict=True))
    dots = []
    for place, point in zip(middle, points, strict=True):
        words = f"{point['workers']} workers, {name}: {values.percent(point['efficiency'])}, "
        words += f"{values.ms(point['step_ms'])} per step ({_BASIS[point['basis']]})"
        dots.append(axes.dot(*place, words, f"s{colour} {point['basis']}", 5))
    area = axes.curve(lower + upper[::-1], f"band s{colour}", "polygon")
    return element("g", area, axes.curve(middle, f"curve s{colour}"), dots)


def _names(curves: dict[str, _Points], y: Scale) -> list[Markup]:
    """Labels the end of each curve; labels never overlap."""
    ends = sorted((y(points[-1]["efficiency"]), index, name) for index, (name, points) in enumerate(curves.items()))
    made, last = [], -100.0
    for place, index, name in ends:
        last = max(place, last + 16)
        made.append(axes.text(WIDTH - 160, last + 4, name, class_=f"name s{index % 4}"))
    return made


def _caption(scaling: dict[str, Any]) -> str:
    caption = "Full dots use measured costs, rings fitted costs, pale rings extrapolated costs."
    knee = scaling.get("knee_workers")
    if knee == 1:
        caption += " Even a second worker gains little."
    elif knee is not None:
        caption += f" Beyond {knee} workers, each further one gains little."
    if scaling.get("worth_trying"):
        caption += f" Worth trying: {', '.join(str(count) for count in scaling['worth_trying'])} workers."
    if scaling.get("left_out"):
        caption += f" Omitted: {'; '.join(scaling['left_out'])}."
    return caption


def _table(points: _Points) -> Markup:
    rows = [
        [point["workers"], point["network"], point["algorithm"], values.ms(point["step_ms"]),
         values.ms_range(point["low_ms"], point["high_ms"]), values.percent(point["efficiency"]),
         _BASIS[point["basis"]]]
        for point in points
    ]  # fmt: skip
    headers = ["workers", "network", "algorithm", "step", "interval, ms", "efficiency", "basis"]
    return components.table(headers, rows, "rllrrrl", "Scaling by number of workers")
