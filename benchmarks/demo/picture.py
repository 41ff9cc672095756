"""One step with DDP above the same step with gradcast, measured and predicted, to one scale of time."""

from typing import Any

from matplotlib.patches import Patch

from benchmarks.demo.lanes import BACKWARD, FORWARD, UPDATE, WAIT, Block, Lanes, Span
from gradcast.plots.canvas import bare, plt, save

_COLOURS = {BACKWARD: "#b9c0c9", FORWARD: "#7fb6a2", UPDATE: "#8d6a9f", WAIT: "#d1495b"}
_LINK = "#3d6fa5"
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

Row = tuple[str, Lanes]


def draw(path: str, rows: list[Row], *, title: str, subtitle: str) -> None:
    """``rows`` from the top: what each is, in a few words, and its lanes."""
    end_ms = max(lanes.end_ms for _, lanes in rows)
    figure, axes = plt.subplots(figsize=(11, 1.9 + 1.25 * len(rows)), layout="constrained")
    axes.set_xlim(0, 1.01 * end_ms)
    axes.set_ylim(-_ROW * (len(rows) - 1) - 0.15, 2 * _LANE + _GAP + 0.75)
    ticks: list[tuple[float, str]] = []
    for index, (name, lanes) in enumerate(rows):
        y = -_ROW * index
        upper = y + _LANE + _GAP
        axes.text(
            0, upper + _LANE + 0.12, f"{name}: {lanes.end_ms:.0f} ms", fontsize=11, fontweight="bold", va="bottom"
        )
        _draw_compute(axes, upper, lanes.compute)
        _draw_link(axes, y, lanes.link)
        axes.plot([lanes.end_ms] * 2, [y, upper + _LANE], color="black", linewidth=1.5)
        ticks += [(upper + _LANE / 2, "compute"), (y + _LANE / 2, "network")]
    axes.set_yticks(*zip(*ticks, strict=True))
    axes.set_xlabel("ms from the start of backward; a step ends where the next backward can start")
    figure.suptitle(title, fontsize=13, x=0.01, ha="left", fontweight="bold")
    axes.set_title(subtitle, fontsize=9.5, loc="left", color="#444444")
    bare(axes)
    handles = [Patch(facecolor=_COLOURS[kind], label=_NAMES[kind]) for kind in _NAMES]
    handles.append(Patch(facecolor=_LINK, label="gradients on the network (MB)"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    save(figure, path)


def _draw_compute(axes: Any, y: float, spans: list[Span]) -> None:
    for span in spans:
        axes.broken_barh([(span.start_ms, span.end_ms - span.start_ms)], (y, _LANE), facecolor=_COLOURS[span.kind])


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
            axes.broken_barh(span, (low, height), facecolor=_LINK, edgecolor="white", linewidth=seam)
            if length_ms > _LABEL_SHARE * width_ms:
                middle = (block.start_ms + length_ms / 2, low + height / 2)
                text = f"{block.size_bytes / 1e6:.2f}"
                axes.text(*middle, text, ha="center", va="center", fontsize=9 if height > 0.5 else 7, color="white")


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
