"""Plot of ``gradcast simulate`` on several networks: speed-up over DDP against bandwidth, one panel per world size."""

from typing import Any

from gradcast import _core
from gradcast.comparison.compare import BASELINE
from gradcast.palette import CURVES
from gradcast.plots.canvas import draw_grid, literal, plt, save

# Markers distinguish repeated colours.
_MARKERS = ["o", "s", "^", "v", "D", "P", "X", "<", ">", "*"]
_LOWEST_SPEEDUP = 0.5
_MARGIN = 0.04


def draw_sweep(path: str, rows: list[dict[str, Any]], *, title: str) -> None:
    """Draws the lines of ``gradcast simulate --csv``."""
    world_sizes = sorted({row["workers"] for row in rows})
    size = (1.6 + 3.9 * len(world_sizes), 4.4)
    figure, panels = plt.subplots(1, len(world_sizes), figsize=size, sharey=True, squeeze=False, layout="constrained")
    policies = [info.name for info in _core.policies() if any(row["policy"] == info.name for row in rows)]
    for axes, workers in zip(panels[0], world_sizes, strict=True):
        _draw_panel(axes, [row for row in rows if row["workers"] == workers], policies)
        axes.set_title(f"{workers} worker{'s' if workers != 1 else ''}", fontsize=10)
    panels[0][0].set_ylabel(f"speed-up over {BASELINE}")
    low, below = _lower_limit(rows, policies)
    panels[0][0].set_ylim(low, max(row["speedup_over_ddp"] for row in rows) + _MARGIN)
    if below:
        figure.supxlabel(f"below the axis at some points: {', '.join(below)}", fontsize=8, wrap=True)
    figure.suptitle(literal(title), fontsize=11)
    lines = {line.get_label(): line for axes in panels[0] for line in axes.get_lines()}
    shown = [policy for policy in policies if policy in lines]
    figure.legend(
        [lines[policy] for policy in shown],
        shown,
        loc="outside right center",
        frameon=False,
        fontsize=9,
        handlelength=3,
    )
    save(figure, path)


def _lower_limit(rows: list[dict[str, Any]], policies: list[str]) -> tuple[float, list[str]]:
    """Returns the axis's lower end, and the policies below it: a far slower one would flatten the other lines."""
    slowest: dict[str, float] = {}
    for row in rows:
        policy, speedup = row["policy"], row["speedup_over_ddp"]
        slowest[policy] = min(speedup, slowest.get(policy, speedup))
    low = max(_LOWEST_SPEEDUP, min(slowest.values()) - _MARGIN)
    return low, [policy for policy in policies if slowest[policy] < low]


def _draw_panel(axes: Any, rows: list[dict[str, Any]], policies: list[str]) -> None:
    for index, policy in enumerate(policies):
        points = sorted(
            (row["bandwidth_gbit_per_s"], row["speedup_over_ddp"]) for row in rows if row["policy"] == policy
        )
        if not points:
            continue
        own = policy == _core.DEFAULT_POLICY
        axes.plot(
            *zip(*points, strict=True),
            color=CURVES[index % len(CURVES)],
            linestyle="-" if index < len(CURVES) else "--",
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=5,
            linewidth=2.6 if own else 1.2,
            zorder=4 if own else 3,
            label=policy,
        )
    draw_grid(axes, sorted({row["bandwidth_gbit_per_s"] for row in rows}))
    axes.set_xlabel("Gbit/s")
