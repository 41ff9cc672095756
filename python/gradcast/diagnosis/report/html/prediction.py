"""Predicted against measured: the step as a whole, and each block."""

import math
from typing import Any

from gradcast.diagnosis.report.html import axes, numbers, parts
from gradcast.diagnosis.report.html.axes import WIDTH, Scale, ticks
from gradcast.diagnosis.report.html.markup import Markup, element

_HEIGHT = 330.0
_BAND = 0.05
# Left of here the scatter of the blocks, right of it the bars of the step.
_MIDDLE = 470.0


def draw(run: dict[str, Any]) -> Markup:
    heading = "Predicted and measured"
    prediction = run.get("prediction")
    if not prediction:
        return parts.missing(
            "prediction",
            heading,
            parts.untried(run, "No step followed a plan in this run: there is nothing to hold predictions against."),
        )
    pairs = block_pairs(run)
    left = _scatter(pairs) if pairs else []
    label = (
        "Left: per block, measured time over predicted time. Right: the step now, predicted, measured, and its floor."
    )
    picture = axes.svg(_HEIGHT, label, left, _bars(run, prediction))
    off = [measured / predicted - 1 for _, predicted, measured in pairs if predicted > 0]
    return parts.section(
        "prediction", heading, parts.figure(picture, _caption(prediction, off)), _table(run, prediction)
    )


def block_pairs(run: dict[str, Any]) -> list[tuple[int, float, float]]:
    """Per block: number, predicted and measured time, as in gradcast.training.measure.network_cost.

    Measured from when the block was due to its end: the mean of the ranks, or the shortest time where some rank's
    gradients were late, since that rank does not wait.
    """
    planned = {block["block"]: block for block in (run.get("predicted_timeline") or {}).get("blocks", [])}
    taken: dict[int, list[tuple[float, bool]]] = {}
    for rank in run.get("timeline") or []:
        free_ms = -math.inf
        for block in sorted(rank["blocks"], key=lambda each: each["block"]):
            due_ms = min(block["launch_ms"], max(block["ready_ms"], free_ms))
            # A step may have followed another plan than the one that was predicted.
            if block["bytes"] == planned.get(block["block"], {}).get("bytes"):
                at_once = due_ms > block["ready_ms"]
                taken.setdefault(block["block"], []).append((block["finish_ms"] - due_ms, at_once))
            free_ms = block["finish_ms"]
    return [
        (number, planned[number]["finish_ms"] - planned[number]["launch_ms"], _of_all(taken[number]))
        for number in sorted(taken)
    ]


def _of_all(ranks: list[tuple[float, bool]]) -> float:
    times = [time_ms for time_ms, _ in ranks]
    return sum(times) / len(times) if all(at_once for _, at_once in ranks) else min(times)


def _scatter(pairs: list[tuple[int, float, float]]) -> list[Markup]:
    most = max(max(predicted, measured) for _, predicted, measured in pairs) * 1.08 or 1
    x, y = Scale(0, most, 70, _MIDDLE - 30), Scale(0, most, _HEIGHT - 50, 16)
    marks = ticks(0, most, 5)
    made = axes.left_axis(y, marks, 70, _MIDDLE - 30)
    made += [axes.text(x(value), _HEIGHT - 32, axes.number(value), "middle", "tick") for value in marks]
    made += [
        axes.text(_MIDDLE - 30, _HEIGHT - 12, "predicted ms of a block", "end", "tick"),
        axes.text(70, 10, "measured ms", "start", "tick"),
    ]
    ends = [(0, 0), (most / (1 + _BAND), most), (most, most), (most, most * (1 - _BAND))]
    made.append(axes.area([(x(a), y(b)) for a, b in ends], "band"))
    made.append(element("line", x1=x(0), y1=y(0), x2=x(most), y2=y(most), class_="diagonal"))
    for number, predicted, measured in pairs:
        words = f"block {number}: predicted {numbers.ms(predicted)}, measured {numbers.ms(measured)}"
        made.append(axes.dot(x(predicted), y(measured), words, "measured"))
    return made


def rows_of(run: dict[str, Any], prediction: dict[str, Any]) -> list[tuple[str, float, str]]:
    rows = [("step now", run["step"]["ms"], "p-rest")]
    mode = prediction.get("mode") or "plan"
    rows.append((f"{mode} mode, predicted", prediction.get("predicted_ms"), "predicted-bar"))
    rows.append((f"{mode} mode, measured", prediction.get("measured_ms"), "measured-bar"))
    rows.append(("floor", run.get("floor_ms"), "floor-bar"))
    return [row for row in rows if row[1]]


def _bars(run: dict[str, Any], prediction: dict[str, Any]) -> list[Markup]:
    rows = rows_of(run, prediction)
    scale = Scale(0, max(value for _, value, _ in rows), _MIDDLE + 20, WIDTH - 90)
    made = []
    for index, (name, value, class_) in enumerate(rows):
        y = 26 + index * 66
        made.append(axes.text(scale(0), y, name, "start", "name"))
        made.append(axes.bar(scale(0), y + 8, scale(value) - scale(0), 24, f"{name}: {numbers.ms(value)}", class_))
        made.append(axes.text(scale(value) + 8, y + 25, numbers.ms(value), "start", "shown"))
    return made


def _caption(prediction: dict[str, Any], off: list[float]) -> str:
    told = ""
    if prediction.get("predicted_ms") and prediction.get("measured_ms"):
        more = prediction["measured_ms"] / prediction["predicted_ms"] - 1
        told = f"The step took {100 * abs(more):.1f} % {'longer' if more >= 0 else 'less'} than predicted. "
    if not off:
        return told + "Blocks were not predicted one by one."
    within = sum(abs(each) <= _BAND for each in off)
    blocks = f"{within} of {numbers.plural(len(off), 'block')} lie within 5 % of their prediction (the band)."
    return f"{told}{blocks} Of a block's times on the ranks the mean counts, or the shortest where gradients came late."


def _table(run: dict[str, Any], prediction: dict[str, Any]) -> Markup:
    now_ms = run["step"]["ms"]
    rows = [[name, numbers.ms(value), numbers.times(now_ms / value)] for name, value, _ in rows_of(run, prediction)]
    return parts.table(["step", "time", "speedup over now"], rows, "lrr", "The step as a whole")
