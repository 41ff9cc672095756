"""The bandwidth of each step, beside what the network check measured."""

import statistics
from typing import Any

from gradcast.diagnosis.report.html import axes, components, values
from gradcast.diagnosis.report.html.axes import LEFT, RIGHT, WIDTH, Scale, ticks
from gradcast.diagnosis.report.html.markup import Markup, element

_HEIGHT = 220.0


def draw(run: dict[str, Any]) -> Markup:
    heading = "Bandwidth over time"
    points = [point for point in run.get("bandwidth") or [] if point["gbit_per_s"] is not None]
    if not points:
        why = "No step followed a plan in this run, so its bandwidth was not measured."
        return components.untried(run, "bandwidth", heading, why)
    reachable = check_rate(run)
    most = max([*(point["gbit_per_s"] for point in points), reachable or 0]) * 1.1
    steps = [point["step"] for point in points]
    x, y = Scale(min(steps), max(steps), LEFT, WIDTH - RIGHT), Scale(0, most, _HEIGHT - 44, 14)
    whole = [value for value in ticks(min(steps), max(steps), 10) if value == int(value)]
    numbers = axes.numbers(whole), axes.numbers(ticks(0, most, 4))
    made = axes.frame(x, y, *numbers, "step that followed the plan")
    made.append(axes.text(LEFT, 9, "Gbit/s", "end", "tick"))
    if reachable is not None:
        words = f"large all-reduces in the network check: {values.rate(reachable)}"
        made.append(axes.text(WIDTH - RIGHT, y(reachable) - 6, words, "end", "tick"))
        ends = {"x1": LEFT, "x2": WIDTH - RIGHT, "y1": y(reachable), "y2": y(reachable)}
        made.append(element("line", **ends, class_="reference"))
    path = [(x(point["step"]), y(point["gbit_per_s"])) for point in points]
    made.append(axes.line(path, "curve"))
    rows = [[point["step"], values.ms(point.get("at_ms")), values.rate(point["gbit_per_s"])] for point in points]
    for place, (step, after, rate) in zip(path, rows, strict=True):
        made.append(axes.dot(*place, f"step {step}, after {after}: {rate}", "measured", 3))
    label = f"Bandwidth of blocks over {values.plural(len(points), 'step')}."
    return components.section(
        "bandwidth",
        heading,
        components.figure(axes.svg(_HEIGHT, label, made), _caption(points, reachable)),
        components.table(["step", "after", "bandwidth"], rows, "rrr", "Bandwidth per step"),
    )


def check_rate(run: dict[str, Any]) -> float | None:
    """Returns the Gbit/s of a large all-reduce in the network check: its own bytes over its time."""
    collective = (run.get("network") or {}).get("collective") or {}
    beta = collective.get("beta_ns_per_byte")
    return 8 / beta if beta else None


def _caption(points: list[dict[str, Any]], reachable: float | None) -> str:
    rates = [point["gbit_per_s"] for point in points]
    middle = statistics.median(rates)
    caption = (
        f"Bytes of blocks over the time in which any was in flight: {values.rate(middle)} in the median, "
        f"from {values.rate(min(rates))} to {values.rate(max(rates))}."
    )
    if not reachable:
        return caption
    return f"{caption} That is {values.percent(middle / reachable)} of what large all-reduces reach."
