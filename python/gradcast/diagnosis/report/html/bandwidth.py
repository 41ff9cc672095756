"""The bandwidth of each step, beside that of the network check."""

import statistics
from typing import Any

from gradcast.diagnosis.report.html import axes, components, values
from gradcast.diagnosis.report.html.axes import LEFT, RIGHT, WIDTH, Scale, ticks
from gradcast.diagnosis.report.html.markup import Markup

_HEIGHT = 220.0


def draw(run: dict[str, Any]) -> list[Markup]:
    points = run["bandwidth"]
    steps, rates = ([point[key] for point in points] for key in ("step", "gbit_per_s"))
    # Of a large all-reduce in the network check: its own bytes over its time.
    beta = ((run.get("network") or {}).get("collective") or {}).get("beta_ns_per_byte")
    reachable = 8 / beta if beta else None
    most = max([*rates, reachable or 0]) * 1.1
    x, y = Scale(min(steps), max(steps)), Scale(0, most, _HEIGHT - 44, 14)
    whole = [value for value in ticks(min(steps), max(steps), 10) if value == int(value)]
    drawn = axes.frame(x, y, axes.numbers(whole), axes.numbers(ticks(0, most, 4)), "step that followed the plan")
    drawn.append(axes.text(LEFT, 9, "Gbit/s", "end", "tick"))
    middle = statistics.median(rates)
    caption = (
        f"Bytes of blocks over the time in which any was in flight: {values.rate(middle)} in the median, "
        f"from {values.rate(min(rates))} to {values.rate(max(rates))}."
    )
    if reachable is not None:
        words = f"large all-reduces in the network check: {values.rate(reachable)}"
        drawn.append(axes.text(WIDTH - RIGHT, y(reachable) - 6, words, "end", "tick"))
        drawn.append(axes.line(LEFT, y(reachable), WIDTH - RIGHT, y(reachable), "reference"))
        caption += f" That is {values.percent(middle / reachable)} of what large all-reduces reach."
    path = [(x(step), y(rate)) for step, rate in zip(steps, rates, strict=True)]
    drawn.append(axes.curve(path, "curve"))
    rows = [[point["step"], values.ms(point.get("at_ms")), values.rate(point["gbit_per_s"])] for point in points]
    for place, (step, after, rate) in zip(path, rows, strict=True):
        drawn.append(axes.dot(*place, f"step {step}, after {after}: {rate}", "measured", 3))
    label = f"Bandwidth of blocks over {values.plural(len(points), 'step')}."
    return [
        axes.figure(_HEIGHT, label, caption, drawn),
        components.table(["step", "after", "bandwidth"], rows, "rrr", "Bandwidth per step"),
    ]
