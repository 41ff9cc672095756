"""Predicted against measured: the step as a whole, and each block."""

import math
from typing import Any

from gradcast.diagnosis.report.html import axes, components, values
from gradcast.diagnosis.report.html.axes import WIDTH, Scale, ticks
from gradcast.diagnosis.report.html.markup import Markup

_HEIGHT = 330.0
_BAND = 0.05
# The scatter plot of blocks is left of this, the bars of the step right of it.
_MIDDLE = 470.0

_Pairs = list[tuple[int, float, float]]


def draw(run: dict[str, Any]) -> list[Markup]:
    pairs, bars = block_pairs(run), _bars(run)
    label = (
        "Left: measured against predicted time of each block. Right: the step now, predicted, measured, and its floor."
    )
    now_ms = run["step"]["ms"]
    rows = [[name, values.ms(value), values.times(now_ms / value)] for name, value, _ in bars]
    return [
        axes.figure(_HEIGHT, label, _caption(run["prediction"], pairs), _scatter(pairs), _drawn_bars(bars)),
        components.table(["step", "time", "speedup"], rows, "lrr", "The step as a whole"),
    ]


def block_pairs(run: dict[str, Any]) -> _Pairs:
    """Returns number, predicted and measured time of each block, as in gradcast.training.measure.network_cost.

    A block's measured time runs from when it was pending to its end. It is the mean over the ranks; but if gradients
    of some rank were late, it is the shortest time, which is that of the rank that did not wait.
    """
    planned = {block["block"]: block for block in (run.get("predicted_timeline") or {}).get("blocks", [])}
    durations: dict[int, list[tuple[float, bool]]] = {}
    for rank in run.get("timeline") or []:
        free_ms = -math.inf
        for block in sorted(rank["blocks"], key=lambda each: each["block"]):
            due_ms = min(block["launch_ms"], max(block["ready_ms"], free_ms))
            # The step may have followed another plan than the predicted one.
            if block["bytes"] == planned.get(block["block"], {}).get("bytes"):
                back_to_back = due_ms > block["ready_ms"]
                durations.setdefault(block["block"], []).append((block["finish_ms"] - due_ms, back_to_back))
            free_ms = block["finish_ms"]
    return [
        (number, planned[number]["finish_ms"] - planned[number]["launch_ms"], _over_ranks(durations[number]))
        for number in sorted(durations)
    ]


def _over_ranks(ranks: list[tuple[float, bool]]) -> float:
    times = [time_ms for time_ms, _ in ranks]
    return sum(times) / len(times) if all(back_to_back for _, back_to_back in ranks) else min(times)


def _scatter(pairs: _Pairs) -> list[Markup]:
    if not pairs:
        return []
    most = max(max(predicted, measured) for _, predicted, measured in pairs) * 1.08 or 1
    x, y = Scale(0, most, 70, _MIDDLE - 30), Scale(0, most, _HEIGHT - 50, 16)
    marks = axes.numbers(ticks(0, most, 5))
    ends = [(0, 0), (most / (1 + _BAND), most), (most, most), (most, most * (1 - _BAND))]
    drawn = [
        *axes.frame(x, y, marks, marks, "predicted ms of a block"),
        axes.text(70, 10, "measured ms", class_="tick"),
        axes.curve([(x(a), y(b)) for a, b in ends], "band", "polygon"),
        axes.line(x(0), y(0), x(most), y(most), "diagonal"),
    ]
    for number, predicted, measured in pairs:
        words = f"block {number}: predicted {values.ms(predicted)}, measured {values.ms(measured)}"
        drawn.append(axes.dot(x(predicted), y(measured), words, "measured"))
    return drawn


def _bars(run: dict[str, Any]) -> list[tuple[str, float, str]]:
    prediction = run["prediction"]
    mode = prediction.get("mode") or "plan"
    bars = [
        ("step now", run["step"]["ms"], "p-rest"),
        (f"{mode} mode, predicted", prediction.get("predicted_ms"), "predicted-bar"),
        (f"{mode} mode, measured", prediction.get("measured_ms"), "measured-bar"),
        ("floor", run.get("floor_ms"), "floor-bar"),
    ]
    return [bar for bar in bars if bar[1]]


def _drawn_bars(bars: list[tuple[str, float, str]]) -> list[Markup]:
    scale = Scale(0, max(value for _, value, _ in bars), _MIDDLE + 20, WIDTH - 90)
    drawn = []
    for index, (name, value, class_) in enumerate(bars):
        y = 26 + index * 66
        drawn.append(axes.text(scale(0), y, name, class_="name"))
        drawn.append(axes.bar(scale(0), y + 8, scale(value) - scale(0), 24, f"{name}: {values.ms(value)}", class_))
        drawn.append(axes.text(scale(value) + 8, y + 25, values.ms(value), class_="shown"))
    return drawn


def _caption(prediction: dict[str, Any], pairs: _Pairs) -> str:
    caption = ""
    if prediction.get("predicted_ms") and prediction.get("measured_ms"):
        more = prediction["measured_ms"] / prediction["predicted_ms"] - 1
        caption = f"The step took {100 * abs(more):.1f} % {'longer' if more >= 0 else 'less'} than predicted. "
    off = [measured / predicted - 1 for _, predicted, measured in pairs if predicted > 0]
    if not off:
        return caption + "There are no predictions of single blocks."
    within = sum(abs(each) <= _BAND for each in off)
    blocks = f"{within} of {values.plural(len(off), 'block')} lie within 5 % of their prediction (the band)."
    return f"{caption}{blocks} A block's time is the mean over the ranks, or the shortest if gradients came late."
