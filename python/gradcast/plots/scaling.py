"""Step time and efficiency against the number of workers, with the band of each curve; one column per network."""

from collections.abc import Callable
from typing import Any

from gradcast.comparison.compare import ratio
from gradcast.palette import CURVES, FAINT
from gradcast.plots.canvas import draw_grid, literal, plt, save
from gradcast.scaling.estimate import MEASURED, Band, Point
from gradcast.scaling.growth import ALGORITHMS

_COLOURS = dict(zip(ALGORITHMS, CURVES, strict=False))
_HEADROOM = 1.05
_FACES = {"measured": "full", "fitted": "left", "extrapolated": "none"}


def draw_scaling(path: str, band: Band, *, title: str) -> None:
    curves = band.curves()
    networks = list(dict.fromkeys(network for network, _ in curves))
    size = (2.2 + 4.4 * len(networks), 7.0)
    figure, panels = plt.subplots(
        2, len(networks), figsize=size, sharex="col", sharey="row", squeeze=False, layout="constrained"
    )
    for column, network in enumerate(networks):
        own = {algorithm: points for (name, algorithm), points in curves.items() if name == network}
        _draw_curves(panels[0][column], own, lambda p: (p.low_ns / 1e6, p.step_ns / 1e6, p.high_ns / 1e6))
        _draw_curves(panels[1][column], own, _efficiencies)
        panels[0][column].set_title("the measured network" if network == MEASURED else network, fontsize=10)
        panels[1][column].set_xlabel("workers")
    panels[0][0].set_ylabel("step, ms")
    panels[1][0].set_ylabel("efficiency, %")
    if band.knee is not None:
        _draw_knee(panels[1][0], band.knee)
    # After all columns are drawn, since they share these axes.
    panels[0][0].set_ylim(0, _HEADROOM * max(point.high_ns / 1e6 for point in band.points))
    panels[1][0].set_ylim(0, 100 * _HEADROOM)
    figure.suptitle(literal(title), fontsize=11)
    handles = _key(sorted({algorithm for _, algorithm in curves}, key=ALGORITHMS.index), band)
    figure.legend(handles=handles, loc="outside right center", frameon=False, fontsize=9)
    save(figure, path)


def _draw_curves(
    axes: Any, curves: dict[str, list[Point]], values: Callable[[Point], tuple[float, float, float]]
) -> None:
    """``values`` returns (low, middle, high) of a point."""
    for algorithm, points in curves.items():
        workers = [point.workers for point in points]
        low, middle, high = zip(*map(values, points), strict=True)
        colour = _COLOURS[algorithm]
        axes.fill_between(workers, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(workers, middle, color=colour, linewidth=1.6, zorder=3)
        for point, value in zip(points, middle, strict=True):
            axes.plot(point.workers, value, color=colour, **_marker(point.basis), zorder=4)
    workers = sorted({point.workers for points in curves.values() for point in points})
    draw_grid(axes, workers[:: 1 + len(workers) // 8])  # more labels would overlap


def _marker(basis: str) -> dict[str, Any]:
    return {
        "marker": "o",
        "markersize": 6,
        "fillstyle": _FACES[basis],
        "markerfacecoloralt": "white",
        "linestyle": "none",
    } | ({"markerfacecolor": "white"} if basis == "extrapolated" else {})


def _efficiencies(point: Point) -> tuple[float, float, float]:
    """In percent: an efficiency is low at the long end of the step's interval."""
    low, middle, high = (
        100 * point.efficiency * ratio(point.step_ns, end_ns) for end_ns in (point.high_ns, point.step_ns, point.low_ns)
    )
    return low, middle, high


def _draw_knee(axes: Any, knee: int) -> None:
    axes.axvline(knee, color=FAINT, linewidth=0.8, linestyle="--")
    axes.annotate(
        f"knee: {knee}", (knee, 0.04), xycoords=("data", "axes fraction"), xytext=(-4, 0),
        textcoords="offset points", ha="right", fontsize=8,
    )  # fmt: skip


def _key(algorithms: list[str], band: Band) -> list[Any]:
    """Colours stand for algorithms, markers for the basis of a point's costs."""
    lines = [plt.Line2D([], [], color=_COLOURS[name], linewidth=1.6, label=name) for name in algorithms]
    found = {point.basis for point in band.points}
    return lines + [
        plt.Line2D([], [], color=FAINT, **_marker(basis), label=f"costs {basis}") for basis in _FACES if basis in found
    ]
