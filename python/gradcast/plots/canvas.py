"""Shared parts of all plots."""

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from gradcast.disk import write_file
from gradcast.palette import COMPUTE, GRID, INK, WAIT
from gradcast.terminal import visible

__all__ = ["Bar", "bare", "draw_grid", "draw_steps", "legend_below", "literal", "plt", "save"]

_DPI = 150
_LITERAL_MAX = 160
_BAR = 0.68  # height


@dataclass(frozen=True)
class Bar:
    """A measured step: compute alone, and the addition of communication."""

    name: str
    step_ms: float
    low_ms: float
    high_ms: float
    label: str
    own: bool = False  # by gradcast's planner, for a bold name
    predicted_ms: float | None = None


def draw_steps(axes: Any, bars: Sequence[Bar], *, compute_ms: float, bound_ms: float) -> None:
    ends_ms = [max(bar.high_ms, bar.step_ms, bar.predicted_ms or 0) for bar in bars]
    end_ms = max(ends_ms)
    axes.set_xlim(0, 1.17 * end_ms)  # room for the labels at the right
    axes.set_ylim(len(bars) - 0.45, -0.55)
    for place, bar in enumerate(bars):
        axes.barh(place, bar.step_ms, _BAR, color=WAIT)
        axes.barh(place, min(bar.step_ms, compute_ms), _BAR, color=COMPUTE)
        axes.plot([bar.low_ms, bar.high_ms], [place, place], color=INK, linewidth=1.4, solid_capstyle="butt")
        if bar.predicted_ms is not None:
            for colour, length, width in (("white", 13, 3), (INK, 12, 1.4)):
                axes.plot(bar.predicted_ms, place, "|", color=colour, markersize=length, markeredgewidth=width)
        axes.text(ends_ms[place] + 0.012 * end_ms, place, bar.label, va="center", fontsize=8.5)
    axes.axvline(bound_ms, color=INK, linestyle="--", linewidth=1.2)
    axes.set_yticks(range(len(bars)), [literal(bar.name) for bar in bars])
    for label, bar in zip(axes.get_yticklabels(), bars, strict=True):
        label.set_fontweight("bold" if bar.own else "normal")
    bare(axes)


def bare(axes: Any) -> None:
    """Removes all axis lines but the time axis."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)


def draw_grid(axes: Any, ticks: Sequence[float] = ()) -> None:
    """Draws grid lines. ``ticks``: the only ticks of the x axis, which is logarithmic."""
    if ticks:
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)


def legend_below(figure: Any, handles: Iterable[Any] | None = None) -> None:
    """Draws the legend. ``handles``: with their labels; None for those of all axes."""
    found = None if handles is None else list(handles)
    figure.legend(handles=found, loc="outside lower center", ncols=len(found or range(6)), frameon=False, fontsize=9)


def literal(text: str) -> str:
    """Returns text from files for a picture: shortened, and with dollar signs that begin no formula."""
    shown = visible(text).replace("$", r"\$")
    return shown if len(shown) <= _LITERAL_MAX else f"{shown[:_LITERAL_MAX]}…"


def save(figure: Any, path: str) -> None:
    content = io.BytesIO()
    try:
        figure.savefig(content, dpi=_DPI, format=Path(path).suffix.removeprefix(".").lower() or "png")
    finally:
        plt.close(figure)
    write_file(path, content.getvalue(), "picture")
