"""Plot of ``gradcast dev lab train``: a bar per variant."""

from matplotlib.patches import Patch

from gradcast.lab.results import Table, VariantResult
from gradcast.lab.variants import COMPUTE
from gradcast.palette import COMPUTE as COMPUTE_COLOUR
from gradcast.palette import INK, WAIT
from gradcast.plots.canvas import Bar, draw_steps, legend_below, plt, save

_WHOLE_MS = 100  # longer steps are shown without decimals


def draw_lab(path: str, table: Table, *, title: str) -> None:
    rows = table.rows
    figure, axes = plt.subplots(figsize=(10, 1.7 + 0.36 * len(rows)), layout="constrained")
    bars = [
        Bar(row.name, row.step_ms, row.low_ms, row.high_ms, _label(row), own=row.name in ("hook", "overlap"))
        for row in rows
    ]
    draw_steps(axes, bars, compute_ms=table.compute_ms, bound_ms=table.bound_ms)
    axes.set_xlabel("ms per step: the median of all steps (and the speed-up over the best DDP)")
    axes.set_title(title, fontsize=10, loc="left")
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
