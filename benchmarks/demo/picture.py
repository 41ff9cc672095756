"""The steps of all modes with their spread, and one step with DDP above one with gradcast, to one scale of time."""

from typing import Any

from matplotlib.patches import Patch

from benchmarks.demo.lanes import BACKWARD, FORWARD, UPDATE, WAIT, Block, Lanes
from benchmarks.demo.results import MODES, SHOWN, Row
from gradcast import palette
from gradcast.plots.canvas import bare, plt, save

_COLOURS = {BACKWARD: palette.BACKWARD, FORWARD: palette.FORWARD, UPDATE: palette.UPDATE, WAIT: palette.WAIT}
_NAMES = {
    BACKWARD: "backward",
    FORWARD: "forward of the next step",
    UPDATE: "optimizer",
    WAIT: "waits for the network",
}
_LANE = 0.8  # height
_GAP = 0.08  # between the two lanes of a row
_ROW = 2 * _LANE + _GAP + 1.0
_SEAM_SHARE = 0.004  # of the width: narrower spans are drawn without a seam, which would hide them
_LABEL_SHARE = 0.07  # narrower blocks have no label, which would not fit
_LABEL_HEIGHT = 0.25  # nor have flatter ones


def draw(path: str, steps: list[tuple[str, Lanes]], table: list[Row], subtitle: str) -> None:
    """``steps`` from the top: what each is, in a few words, and its lanes."""
    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(11, 7.6), height_ratios=[1, 2.1], layout="constrained", gridspec_kw={"hspace": 0.04}
    )
    figure.suptitle("A training step with PyTorch DDP and with gradcast", fontsize=13, x=0.01, ha="left", weight="bold")
    _draw_medians(upper, table, subtitle)
    _draw_steps(lower, steps)
    handles = [Patch(facecolor=_COLOURS[kind], label=_NAMES[kind]) for kind in _NAMES]
    handles.append(Patch(facecolor=palette.NETWORK, label="gradients on the network (MB)"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    save(figure, path)


def _draw_medians(axes: Any, table: list[Row], subtitle: str) -> None:
    for place, row in enumerate(reversed(table)):
        colour = palette.CURVES[0] if row.mode == SHOWN else palette.GRID
        axes.barh(place, row.step_ms, color=colour, height=0.6)
        spread = [[row.step_ms - row.low_ms], [row.high_ms - row.step_ms]]
        axes.errorbar(row.step_ms, place, xerr=spread, color="black", capsize=3, linewidth=1)
        axes.text(1, place, f"{row.step_ms:.0f} ms", va="center", color="white" if row.mode == SHOWN else "black")
    axes.set_yticks(range(len(table)), [MODES[row.mode] for row in reversed(table)])
    axes.set_xlabel("ms per step: median, and the range of 80 % of the steps")
    axes.set_title(subtitle, fontsize=9.5, loc="left", color=palette.FAINT)
    bare(axes)


def _draw_steps(axes: Any, steps: list[tuple[str, Lanes]]) -> None:
    axes.set_xlim(0, 1.01 * max(lanes.end_ms for _, lanes in steps))
    axes.set_ylim(-_ROW * (len(steps) - 1) - 0.15, 2 * _LANE + _GAP + 0.75)
    ticks: list[tuple[float, str]] = []
    for index, (name, lanes) in enumerate(steps):
        y = -_ROW * index
        above = y + _LANE + _GAP
        axes.text(0, above + _LANE + 0.12, f"{name}: {lanes.end_ms:.0f} ms", fontsize=11, weight="bold", va="bottom")
        for span in lanes.compute:
            place = [(span.start_ms, span.end_ms - span.start_ms)]
            axes.broken_barh(place, (above, _LANE), facecolor=_COLOURS[span.kind])
        _draw_link(axes, y, lanes.link)
        axes.plot([lanes.end_ms] * 2, [y, above + _LANE], color="black", linewidth=1.5)
        ticks += [(above + _LANE / 2, "compute"), (y + _LANE / 2, "network")]
    axes.set_yticks(*zip(*ticks, strict=True))
    axes.set_xlabel("ms from the start of backward; a step ends where the next backward can start")
    bare(axes)


def _draw_link(axes: Any, y: float, blocks: list[Block]) -> None:
    """Blocks that share the link at a time are drawn above one another."""
    width_ms = axes.get_xlim()[1]
    for group in sharing(blocks):
        height = _LANE / len(group)
        for place, block in enumerate(group):
            length_ms = block.end_ms - block.start_ms
            low = y + _LANE - (place + 1) * height
            seam = 1.0 if length_ms > _SEAM_SHARE * width_ms else 0
            span = [(block.start_ms, length_ms)]
            axes.broken_barh(span, (low, height), facecolor=palette.NETWORK, edgecolor="white", linewidth=seam)
            if length_ms > _LABEL_SHARE * width_ms and height > _LABEL_HEIGHT:
                middle = (block.start_ms + length_ms / 2, low + height / 2)
                text = f"{block.size_bytes / 1e6:.2f}"
                axes.text(*middle, text, ha="center", va="center", fontsize=9 if height > 0.5 else 7)


def sharing(blocks: list[Block]) -> list[list[Block]]:
    """Groups of blocks that follow one another in time, each one overlapping another of its group."""
    groups: list[list[Block]] = []
    busy_ms = 0.0
    for block in sorted(blocks, key=lambda block: block.start_ms):
        # What the clocks of two threads cannot tell apart is no overlap.
        if groups and block.start_ms < busy_ms - 0.02 * (block.end_ms - block.start_ms):
            groups[-1].append(block)
        else:
            groups.append([block])
        busy_ms = max(busy_ms, block.end_ms)
    return groups
