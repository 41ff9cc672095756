"""Plot of ``gradcast dev lab train``: a bar per variant."""

from typing import Any

from gradcast.lab.results import Table, VariantResult
from gradcast.lab.variants import COMPUTE
from gradcast.plots.canvas import bare, plt, save

_COLOURS = {"alone": "#b9c0c9", "ddp": "#56B4E9", "hook": "#009E73", "overlap": "#0072B2"}
_POLICY_COLOUR = "#CC79A7"  # a published policy, followed by gradcast's engine
_BOUND = "#222222"
_WHISKER = "#444444"
_BAR = 0.68  # height
_WHOLE_MS = 100  # longer steps are shown without decimals


def draw_lab(path: str, table: Table, *, title: str) -> None:
    """Draws the rows of the table from the top, with lines for compute alone and the lower bound."""
    rows = table.rows
    figure, axes = plt.subplots(figsize=(10, 1.7 + 0.36 * len(rows)), layout="constrained")
    end_ms = max(row.high_ms for row in rows)
    axes.set_xlim(0, 1.17 * end_ms)  # room for the numbers at the right
    axes.set_ylim(len(rows) - 0.45, -0.55)
    for place, row in enumerate(rows):
        axes.barh(place, row.step_ms, _BAR, color=_colour(row))
        # A light edge keeps the dark line visible on dark bars.
        for colour, width in (("white", 3.6), (_WHISKER, 1.6)):
            axes.plot([row.low_ms, row.high_ms], [place, place], color=colour, linewidth=width, solid_capstyle="butt")
        axes.text(max(row.high_ms, row.step_ms) + 0.008 * end_ms, place, _label(row), va="center", fontsize=8.5)
    compute = axes.axvline(table.compute_ms, color=_BOUND, linestyle=":", linewidth=1.2)
    bound = axes.axvline(table.bound_ms, color=_BOUND, linestyle="--", linewidth=1.2)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_fontweight("bold" if row.name in ("hook", "overlap") else "normal")
    axes.set_xlabel("ms per step: the median of all steps (and the speed-up over the best DDP)")
    axes.set_title(title, fontsize=10, loc="left")
    bare(axes)
    whisker = plt.Line2D([], [], color=_WHISKER, linewidth=1.6)
    lines = {"compute alone": compute, "no schedule can take less": bound, "80 % of steps": whisker}
    figure.legend(
        list(lines.values()), list(lines), loc="outside lower center", ncols=len(lines), frameon=False, fontsize=9
    )
    save(figure, path)


def _colour(row: VariantResult) -> Any:
    return _POLICY_COLOUR if row.mode in ("hook", "overlap") and ":" in row.name else _COLOURS[row.mode]


def _label(row: VariantResult) -> str:
    time = f"{row.step_ms:.0f}" if row.step_ms >= _WHOLE_MS else f"{row.step_ms:.1f}"
    return time if row.name == COMPUTE else f"{time}  ({row.ratio_to_best_ddp:.2f} x)"
