"""The plans of the run in order, each with its predicted and measured step."""

from typing import Any

from gradcast.diagnosis.report.html import axes, components, values
from gradcast.diagnosis.report.html.axes import LEFT, RIGHT, WIDTH, Scale, ticks
from gradcast.diagnosis.report.html.markup import Markup, element

_ROW = 30.0


def draw(run: dict[str, Any]) -> list[Markup]:
    versions = run["plan_versions"]
    times_ms = [version[key] for version in versions for key in ("predicted_ms", "measured_ms")]
    margin = max(0.15 * (max(times_ms) - min(times_ms)), 0.01 * max(times_ms))
    low, high = max(0, min(times_ms) - margin), max(times_ms) + margin
    scale = Scale(low, high, LEFT + 90, WIDTH - RIGHT)
    bottom = 14 + _ROW * len(versions)
    axis = axes.bottom_axis(scale, ticks(low, high, 8), bottom, 6, "ms per step")
    drawn = [_row(version, 14 + _ROW * index + _ROW / 2, scale) for index, version in enumerate(versions)]
    label = f"Predicted and measured step of {values.plural(len(versions), 'plan')}."
    caption = "A ring is the predicted step of a plan, a dot the measured one. The axis does not begin at 0."
    rows = [
        [each["version"], each["from_step"], each["policy"], each["blocks"], values.ms(each["predicted_ms"]),
         values.ms(each["measured_ms"])]
        for each in versions
    ]  # fmt: skip
    headers = ["version", "from step", "policy", "blocks", "predicted", "measured"]
    table = components.table(headers, rows, "rrlrrr", "Plans in the order in which they were followed")
    return [axes.figure(bottom + 40, label, caption, axis, drawn), table]


def _row(version: dict[str, Any], y: float, scale: Scale) -> Markup:
    name = f"{version['version']}: {version['policy']}, from step {version['from_step']}"
    predicted, measured = version["predicted_ms"], version["measured_ms"]
    return element(
        "g",
        axes.text(LEFT + 80, y + 4, name, "end", "name"),
        axes.line(scale(predicted), y, scale(measured), y, "interval"),
        axes.dot(scale(predicted), y, f"{name}: predicted {values.ms(predicted)}", "promised", 6),
        axes.dot(scale(measured), y, f"{name}: measured {values.ms(measured)}", "measured", 4.5),
    )
