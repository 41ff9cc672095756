"""The plans of the run in order: what each promised and how long its steps took."""

from typing import Any

from gradcast.diagnosis.report.html import axes, components, values
from gradcast.diagnosis.report.html.axes import LEFT, RIGHT, WIDTH, Scale, ticks
from gradcast.diagnosis.report.html.markup import Markup, element

_ROW = 30.0


def draw(run: dict[str, Any]) -> Markup:
    heading = "Plans"
    versions = run.get("plan_versions") or []
    if not versions:
        return components.missing("plans", heading, "No plan was made in this run.")
    times_ms = [version.get(key) for version in versions for key in ("predicted_ms", "measured_ms")]
    known_ms = [ms for ms in times_ms if ms is not None]
    rows = [
        [each["version"], each["from_step"], each["policy"], each["blocks"], values.ms(each.get("predicted_ms")),
         values.ms(each.get("measured_ms"))]
        for each in versions
    ]  # fmt: skip
    headers = ["version", "from step", "policy", "blocks", "predicted", "measured"]
    table = components.table(headers, rows, "rrlrrr", "Plans in the order in which they were followed")
    return components.section("plans", heading, _picture(versions, known_ms) if known_ms else None, table)


def _picture(versions: list[dict[str, Any]], times_ms: list[float]) -> Markup:
    margin = max(0.15 * (max(times_ms) - min(times_ms)), 0.01 * max(times_ms))
    low, high = max(0, min(times_ms) - margin), max(times_ms) + margin
    scale = Scale(low, high, LEFT + 90, WIDTH - RIGHT)
    bottom = 14 + _ROW * len(versions)
    axis = axes.bottom_axis(scale, ticks(low, high, 8), bottom, 6, "ms per step")
    rows = [_row(version, 14 + _ROW * index + _ROW / 2, scale) for index, version in enumerate(versions)]
    label = f"Predicted and measured step of {values.plural(len(versions), 'plan')}."
    return components.figure(
        axes.svg(bottom + 40, label, axis, rows),
        "A ring is the predicted step of a plan, a dot the measured one. The axis does not begin at 0.",
    )


def _row(version: dict[str, Any], y: float, scale: Scale) -> Markup:
    name = f"{version['version']}: {version['policy']}, from step {version['from_step']}"
    predicted, measured = version.get("predicted_ms"), version.get("measured_ms")
    made = [axes.text(LEFT + 80, y + 4, name, "end", "name")]
    if predicted is not None and measured is not None:
        made.append(element("line", x1=scale(predicted), x2=scale(measured), y1=y, y2=y, class_="interval"))
    if predicted is not None:
        made.append(axes.dot(scale(predicted), y, f"{name}: predicted {values.ms(predicted)}", "promised", 6))
    if measured is not None:
        made.append(axes.dot(scale(measured), y, f"{name}: measured {values.ms(measured)}", "measured", 4.5))
    return element("g", made)
