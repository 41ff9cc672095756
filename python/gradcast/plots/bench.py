"""Plot of gradcast-bench: time over size of each operation with the fitted line, and a bar per policy."""

import json
from typing import Any

import numpy

from gradcast import _core
from gradcast.palette import CURVES
from gradcast.plots.canvas import Bar, bare, draw_grid, draw_steps, literal, plt, save
from gradcast.units import format_time

_COLOURS = dict(zip(("all_reduce", "reduce_scatter", "all_gather"), CURVES, strict=False))
_POINTS_OF_A_LINE = 200


def draw_bench(path: str, results: dict[str, Any]) -> None:
    """Draws the JSON object of gradcast-bench, with a sweep or a schedule."""
    rows = results.get("schedule") or []
    parts = [part for part, there in ((_draw_sweep, results.get("sweep")), (_draw_schedule, rows)) if there]
    figure, axes = plt.subplots(
        1, len(parts), figsize=(6.2 * len(parts), max(4.2, 1.6 + 0.34 * len(rows))), layout="constrained", squeeze=False
    )
    for draw, place in zip(parts, axes[0], strict=True):
        draw(place, results)
    figure.suptitle(
        literal(f"gradcast-bench: {results['world_size']} ranks over {results['transport']}"),
        fontsize=11,
        x=0.01,
        ha="left",
    )
    save(figure, path)


def _draw_sweep(axes: Any, results: dict[str, Any]) -> None:
    link = _core.LinkModel.from_json(json.dumps(results["link"])) if results.get("link") else None
    for op, colour in _COLOURS.items():
        rows = [row for row in results["sweep"] if row["op"] == op and row.get("in_place", True)]
        if not rows:
            continue
        sizes = [row["size_bytes"] for row in rows]
        axes.plot(sizes, [row["time_ns"] / 1e3 for row in rows], "o", color=colour, markersize=4, label=op)
        axes.vlines(
            sizes,
            [row["low_ns"] / 1e3 for row in rows],
            [row["high_ns"] / 1e3 for row in rows],
            color=colour,
            alpha=0.35,
        )
        cost = getattr(link, op, None)
        if cost is not None and cost.pieces:
            points = numpy.geomspace(sizes[0], sizes[-1], _POINTS_OF_A_LINE).round()
            axes.plot(points, [cost.cost_ns(int(size)) / 1e3 for size in points], color=colour, linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(_binary_size)
    axes.yaxis.set_major_formatter(lambda time_us, _: format_time(1e3 * time_us))
    axes.set_xlabel("size of an operation")
    axes.set_ylabel("time: mean, range, and the fitted line")
    axes.legend(frameon=False, fontsize=9)
    draw_grid(axes)
    bare(axes)


def _draw_schedule(axes: Any, results: dict[str, Any]) -> None:
    rows = results["schedule"]
    bars = []
    for place, row in enumerate(rows):
        step_ms, low_ms, high_ms = (row[key] / 1e6 for key in ("step_ns", "low_ns", "high_ns"))
        predicted_ms = row["predicted_ns"] / 1e6
        bars.append(Bar(row["policy"], step_ms, low_ms, high_ms, f"{step_ms:.1f}", place == 0, predicted_ms))
    draw_steps(axes, bars, compute_ms=rows[0]["compute_ns"] / 1e6, bound_ms=rows[0]["bound_ns"] / 1e6)
    axes.set_xlabel("ms per step: compute, and what communication adds\n| predicted    - - lower bound")
    axes.set_title(literal(f"{results['profile']}, {results['mode']} mode"), fontsize=10, loc="left")


def _binary_size(size_bytes: float, _: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:g} {name}"
    return f"{size_bytes:g} B"
