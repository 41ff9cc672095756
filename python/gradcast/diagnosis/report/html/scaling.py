"""Predicted scaling: efficiency with its band, its knee, and numbers of workers worth trying."""

from typing import Any

from gradcast.diagnosis.report.html import axes, components, values
from gradcast.diagnosis.report.html.axes import LEFT, WIDTH, Scale
from gradcast.diagnosis.report.html.markup import Markup, element

_HEIGHT = 330.0
_BASIS = {"measured": "measured", "fitted": "from fitted costs", "extrapolated": "extrapolated"}

_Series = tuple[str, list[dict[str, Any]]]


def draw(run: dict[str, Any]) -> Markup:
    heading = "Scaling"
    scaling = run.get("scaling")
    if not scaling or not scaling.get("points"):
        return components.missing("scaling", heading, "Scaling was not predicted in this run.")
    series = _series(scaling["points"])
    workers = sorted({point["workers"] for point in scaling["points"]})
    right = WIDTH - 170
    x, y = Scale(min(workers), max(workers), LEFT, right, log=True), Scale(0, 1.05, _HEIGHT - 46, 14)
    shares = [(share / 100, f"{share} %") for share in (0, 25, 50, 75, 100)]
    made = axes.frame(x, y, [(count, count) for count in workers], shares, "workers")
    knee = scaling.get("knee_workers")
    if knee is not None and knee > 1:  # one worker is left of the first point
        made.append(element("line", x1=x(knee), x2=x(knee), y1=14, y2=y.start, class_="reference"))
        made.append(axes.text(x(knee) + 6, y.start - 8, f"knee: {knee}", "start", "tick"))
    made += [_curve(index, name, points, x, y) for index, (name, points) in enumerate(series)]
    made.append(_names(series, y))
    label = f"Scaling efficiency over workers, {values.plural(len(series), 'network')}, with the band to expect."
    return components.section(
        "scaling", heading, components.figure(axes.svg(_HEIGHT, label, made), _caption(scaling)), _table(scaling)
    )


def _series(points: list[dict[str, Any]]) -> list[_Series]:
    found: dict[str, list[dict[str, Any]]] = {}
    for point in points:
        name = ", ".join(str(point[key]) for key in ("network", "algorithm") if point.get(key))
        found.setdefault(name, []).append(point)
    return [(name, sorted(each, key=lambda point: point["workers"])) for name, each in found.items()]


def band(point: dict[str, Any]) -> tuple[float, float]:
    """Returns the efficiency at the long and at the short end of the step's interval."""
    efficiency, ms = point["efficiency"], point["step_ms"]
    low = efficiency * ms / point["high_ms"] if point.get("high_ms") else efficiency
    high = efficiency * ms / point["low_ms"] if point.get("low_ms") else efficiency
    return low, min(high, 1.05)


def _curve(index: int, name: str, points: list[dict[str, Any]], x: Scale, y: Scale) -> Markup:
    places = [(x(point["workers"]), y(point["efficiency"])) for point in points]
    lower, upper = ([(x(point["workers"]), y(band(point)[end])) for point in points] for end in (0, 1))
    dots = [
        axes.dot(*place, _words(name, point), f"s{index % 4} {point.get('basis') or ''}", 5)
        for place, point in zip(places, points, strict=True)
    ]
    area = axes.line(lower + upper[::-1], f"band s{index % 4}", "polygon")
    return element("g", area, axes.line(places, f"curve s{index % 4}"), dots)


def _words(name: str, point: dict[str, Any]) -> str:
    basis = _BASIS.get(point.get("basis") or "", point.get("basis") or "")
    efficiency = values.percent(point["efficiency"])
    return f"{point['workers']} workers, {name}: {efficiency}, {values.ms(point['step_ms'])} per step ({basis})"


def _names(series: list[_Series], y: Scale) -> list[Markup]:
    """Labels the end of each curve, with labels moved apart if they would overlap."""
    ends = sorted((y(points[-1]["efficiency"]), index, name) for index, (name, points) in enumerate(series))
    made, last = [], -100.0
    for place, index, name in ends:
        last = max(place, last + 16)
        made.append(axes.text(WIDTH - 160, last + 4, name, "start", f"name s{index % 4}"))
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
        caption += f" Left out: {'; '.join(scaling['left_out'])}."
    return caption


def _table(scaling: dict[str, Any]) -> Markup:
    rows = [
        [point["workers"], point.get("network") or values.UNKNOWN, point.get("algorithm") or values.UNKNOWN,
         values.ms(point["step_ms"]), values.ms_range(point.get("low_ms"), point.get("high_ms")),
         values.percent(point["efficiency"]),
         _BASIS.get(point.get("basis") or "", point.get("basis") or values.UNKNOWN)]
        for point in scaling["points"]
    ]  # fmt: skip
    headers = ["workers", "network", "algorithm", "step", "interval, ms", "efficiency", "basis"]
    return components.table(headers, rows, "rllrrrl", "Scaling by number of workers")
