"""Plots of ``gradcast dev lab``: a bar per variant (train), and the time of each step with its plan (adapt)."""

import itertools
from collections.abc import Callable
from typing import Any

from matplotlib.patches import Patch

from gradcast.lab.results import Table, VariantResult
from gradcast.lab.variants import COMPUTE
from gradcast.palette import CHANGED, CURVES, INK, WAIT
from gradcast.palette import COMPUTE as COMPUTE_COLOUR
from gradcast.plots.canvas import Bar, bare, draw_steps, legend_below, literal, plt, save

_WHOLE_MS = 100  # longer steps are shown without decimals
_STEP, _MEASURING, _TRIED = CURVES[0], CURVES[1], CURVES[5]


def draw_lab(path: str, table: Table, *, title: str) -> None:
    rows = table.rows
    figure, axes = plt.subplots(figsize=(10, 1.7 + 0.36 * len(rows)), layout="constrained")
    bars = [
        Bar(row.name, row.step_ms, row.low_ms, row.high_ms, _label(row), own=row.name in ("hook", "overlap"))
        for row in rows
    ]
    draw_steps(axes, bars, compute_ms=table.compute_ms, bound_ms=table.bound_ms)
    axes.set_xlabel("ms per step: the median of all steps (and the speed-up over the best DDP)")
    axes.set_title(literal(title), fontsize=10, loc="left")
    handles = [
        Patch(facecolor=COMPUTE_COLOUR, label="compute alone"),
        Patch(facecolor=WAIT, label="added by communication"),
        plt.Line2D([], [], color=INK, linewidth=1.4, label="80 % of steps"),
        plt.Line2D([], [], color=INK, linewidth=1.2, linestyle="--", label="no schedule can take less"),
    ]
    legend_below(figure, handles)
    save(figure, path)


def _label(row: VariantResult) -> str:
    time = f"{row.step_ms:.0f}" if row.step_ms >= _WHOLE_MS else f"{row.step_ms:.1f}"
    return time if row.name == COMPUTE else f"{time}  ({row.ratio_to_best_ddp:.2f} x)"


def draw_adapt(path: str, steps: list[dict[str, Any]], changed: range, *, description: str, title: str) -> None:
    """Draws each step with its plan. ``changed``: the steps with the change. ``description``: of the change."""
    figure, axes = plt.subplots(figsize=(10, 3.9), layout="constrained")
    numbers, times_ms = [s["step"] for s in steps], [s["ms"] for s in steps]
    top_ms = 1.18 * sorted(times_ms)[-1 - len(times_ms) // 100]
    axes.set_xlim(0, len(steps))
    axes.set_ylim(0, top_ms)
    axes.axvspan(changed.start, changed.stop, color=CHANGED, linewidth=0, label=description)
    for start, stop in _spans(steps, lambda step: step["measuring"] or None):
        axes.axvspan(start, stop, ymax=0.03, color=_MEASURING, linewidth=0, label=_once(axes, "measures"))
    # Plans of warm-ups have no predictions.
    for start, stop in _spans(steps, lambda step: None if step["measuring"] else step["version"]):
        predicted_ms = steps[start]["predicted_ms"]
        axes.plot(
            [start, stop],
            [predicted_ms] * 2,
            color=INK,
            linestyle="--",
            label=_once(axes, "predicted by the plan"),
        )
        as_ddp = ", as DDP" if steps[start]["runs_as_ddp"] else ""
        place = (start + 0.5, 0.93 * top_ms)
        axes.annotate(f"plan {steps[start]['version']}{as_ddp}", place, fontsize=8.5)
        axes.axvline(start, color=INK, linewidth=0.6, linestyle=":")
    axes.plot(numbers, times_ms, color=_STEP, marker=".", markersize=3, linewidth=0.9, label="step, measured")
    tried = [s for s in steps if s["tries_ddp"]]
    axes.plot(
        [s["step"] for s in tried],
        [s["ms"] for s in tried],
        "o",
        color=_TRIED,
        markersize=4,
        label="tries the DDP baseline",
    )
    axes.set_xlabel("step")
    axes.set_ylabel("ms")
    axes.set_title(literal(title), fontsize=10, loc="left")
    bare(axes)
    axes.spines["left"].set_visible(True)
    legend_below(figure)
    save(figure, path)


def _once(axes: Any, label: str) -> str | None:
    return None if label in axes.get_legend_handles_labels()[1] else label


def _spans(steps: list[dict[str, Any]], key: Callable[[dict[str, Any]], Any]) -> list[tuple[int, int]]:
    """Spans of consecutive steps with the same key, without those whose key is None."""
    groups = [(value, list(group)) for value, group in itertools.groupby(steps, key)]
    return [(group[0]["step"], group[-1]["step"] + 1) for value, group in groups if value is not None]
