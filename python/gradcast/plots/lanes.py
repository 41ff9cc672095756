"""Plans as lanes over time: one plan, or several one above the other.

Each plan has two lanes. The compute lane shows backward, forward, and forward's waits for gradients. The link lane
shows the blocks, coloured by forward's first use of one of their parameters: a good schedule sends the dark ones, which
are used first, as early as possible.
"""

import bisect
from typing import Any

from matplotlib.artist import Artist
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.patches import Patch

from gradcast import _core
from gradcast.comparison.compare import Comparison, has_other_ops, same_bound
from gradcast.palette import BACKWARD, FAINT, FORWARD, INK, NETWORK_SHADES, WAIT
from gradcast.plots.canvas import bare, legend_below, literal, plt, save

_NEED_COLOURS = LinearSegmentedColormap.from_list("first use", NETWORK_SHADES)
_HATCHES = {"reduce_scatter": "////", "all_gather": "...."}  # all-reduces have no hatch
_LANE_HEIGHT = 0.8
_LANE_GAP = 0.08
_SEAM_POINTS = 1.0
# Shares of the width of the axes. Narrower blocks are drawn without seams, which would hide them, or without a label,
# which would not fit.
_SEAM_SHARE = 0.006
_LABEL_SHARE = 0.04

_Span = tuple[float, float]  # start and length, ms


def draw_plan(
    path: str,
    profile: _core.Profile,
    plan: _core.Plan,
    timeline: _core.Timeline,
    *,
    bound_ns: float,
    title: str,
) -> None:
    """Draws a plan. ``bound_ns``: lower bound over plans with the same kinds of operation as this one."""
    figure, axes = plt.subplots(figsize=(11, 3.2), layout="constrained")
    end_ms = timeline.iteration_ns / 1e6
    axes.set_xlim(0, 1.02 * max(end_ms, 1e-6))  # never an empty axis
    axes.set_ylim(-0.1, 2 * _LANE_HEIGHT + _LANE_GAP + 0.1)
    colours = _need_colours(profile)
    _label_blocks(axes, plan, *_draw_lanes(axes, 0, profile, plan, timeline, colours))
    draw_bound(axes, bound_ns)
    middles = [_LANE_HEIGHT / 2, 1.5 * _LANE_HEIGHT + _LANE_GAP]
    axes.set_yticks(middles, ["link\n(blocks, MB)", "compute"])
    axes.set_xlabel("ms from the start of backward")
    blocks = f"{len(plan.blocks)} block{'s' if len(plan.blocks) != 1 else ''}"
    waited_ms = sum(length for _, length in _waits(profile, plan, timeline))
    axes.set_title(
        f"{literal(title)}\n{literal(plan.policy)}, {plan.mode} mode: {blocks}, {end_ms:.1f} ms; "
        f"forward waits {waited_ms:.1f} ms",
        fontsize=10,
        loc="left",
    )
    bare(axes)
    schedules = "schedule" if has_other_ops(plan) else "schedule of all-reduces"
    draw_key(figure, axes, colours, plans=[plan], schedules=schedules)
    save(figure, path)


def draw_comparison(
    path: str, profile: _core.Profile, link: _core.LinkModel, comparison: Comparison, *, title: str
) -> None:
    rows = comparison.rows
    figure, axes = plt.subplots(figsize=(11, 1.6 + 0.7 * len(rows)), layout="constrained")
    slowest_ms = max(row.plan.predicted_ns for row in rows) / 1e6
    axes.set_xlim(0, 1.25 * max(slowest_ms, 1e-6))  # room for the times at the right
    step = 2 * _LANE_HEIGHT + _LANE_GAP + 0.6
    axes.set_ylim(-step * (len(rows) - 1) - 0.3, 2 * _LANE_HEIGHT + _LANE_GAP + 0.3)
    colours = _need_colours(profile)
    middles = []
    for index, row in enumerate(rows):
        y = -step * index
        middle = y + _LANE_HEIGHT + _LANE_GAP / 2
        middles.append(middle)
        _draw_lanes(axes, y, profile, row.plan, _core.play(profile, link, row.plan), colours)
        end_ms = row.plan.predicted_ns / 1e6
        # The line is the bound over all kinds of operation; plans of all-reduces are compared with their own bound.
        kind = "bound" if same_bound(row.plan.bound_ns, comparison.bound.best_ns) else "all-reduce bound"
        text = f"{end_ms:.0f} ms, {row.ratio_to_bound:.2f} x {kind}"
        axes.text(end_ms + 0.012 * slowest_ms, middle, text, va="center", fontsize=9)
    draw_bound(axes, comparison.bound.best_ns)
    axes.set_yticks(middles, [row.policy for row in rows])
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_fontweight("bold" if row.policy == _core.DEFAULT_POLICY else "normal")
    axes.set_xlabel("ms from the start of backward (upper lane: compute, lower lane: link)")
    axes.set_title(literal(title), fontsize=10, loc="left")
    bare(axes)
    # The same words as in the sentence of `gradcast simulate` about this bound.
    draw_key(figure, axes, colours, plans=[row.plan for row in rows], schedules="schedule")
    save(figure, path)


def _draw_lanes(
    axes: Any, y: float, profile: _core.Profile, plan: _core.Plan, timeline: _core.Timeline, colours: Any
) -> tuple[list[_Span], list[Any]]:
    backward_ms = profile.backward_ns / 1e6
    forward_and_waits_ms = timeline.iteration_ns / 1e6 - backward_ms
    upper = (y + _LANE_HEIGHT + _LANE_GAP, _LANE_HEIGHT)
    axes.broken_barh([(0, backward_ms)], upper, facecolor=BACKWARD)
    axes.broken_barh([(backward_ms, forward_and_waits_ms)], upper, facecolor=FORWARD)
    axes.broken_barh(_waits(profile, plan, timeline), upper, facecolor=WAIT)

    lower = (y, _LANE_HEIGHT)
    spans = _wire_spans(timeline)
    shades = [colours.to_rgba(need_ms) for need_ms in _block_needs_ms(profile, plan)]
    seam_ms = _SEAM_SHARE * axes.get_xlim()[1]
    for seamed in (True, False):
        chosen = [index for index, (_, length) in enumerate(spans) if (length >= seam_ms) == seamed]
        axes.broken_barh(
            [spans[index] for index in chosen],
            lower,
            facecolors=[shades[index] for index in chosen],
            edgecolors="white" if seamed else "none",
            linewidth=_SEAM_POINTS if seamed else 0,
        )
    # Hatches over the colours distinguish reduce-scatters and all-gathers.
    for op, hatch in _HATCHES.items():
        hatched = [span for span, block in zip(spans, plan.blocks, strict=True) if block.op == op]
        if hatched:
            axes.broken_barh(hatched, lower, facecolor="none", edgecolor=FAINT, hatch=hatch, linewidth=0)
    return spans, shades


def _wire_spans(timeline: _core.Timeline) -> list[_Span]:
    """Returns each block's time on the wire. With several blocks in flight, launches overlap, but bytes do not."""
    spans = []
    free_ns = 0.0
    for times in timeline.blocks:
        start_ns = max(times.launch_ns, free_ns)
        spans.append((start_ns / 1e6, (times.finish_ns - start_ns) / 1e6))
        free_ns = times.finish_ns
    return spans


def _waits(profile: _core.Profile, plan: _core.Plan, timeline: _core.Timeline) -> list[_Span]:
    if plan.mode == "hook":
        last_ns = max(times.finish_ns for times in timeline.blocks)
        return [(profile.backward_ns / 1e6, max(0.0, last_ns - profile.backward_ns) / 1e6)]
    return [(times.read_ns / 1e6, times.wait_ns / 1e6) for times in timeline.tensors if times.wait_ns > 0]


def _block_needs_ms(profile: _core.Profile, plan: _core.Plan) -> list[float]:
    """Returns the time of forward's first use of a parameter of each block: that of its lowest byte."""
    ends: dict[int, list[int]] = {}
    needs: dict[int, list[float]] = {}
    for tensor in profile.tensors:
        buffer_ends = ends.setdefault(tensor.buffer, [])
        buffer_ends.append((buffer_ends[-1] if buffer_ends else 0) + tensor.bytes)
        needs.setdefault(tensor.buffer, []).append(tensor.need_ns / 1e6)
    return [needs[block.buffer][bisect.bisect_right(ends[block.buffer], block.ranges[0][0])] for block in plan.blocks]


def _need_colours(profile: _core.Profile) -> ScalarMappable:
    last_ms = max(tensor.need_ns for tensor in profile.tensors) / 1e6
    return ScalarMappable(Normalize(0, last_ms if last_ms > 0 else 1), cmap=_NEED_COLOURS)


def _label_blocks(axes: Any, plan: _core.Plan, spans: list[_Span], shades: list[Any]) -> None:
    room_ms = _LABEL_SHARE * axes.get_xlim()[1]
    for block, (start_ms, length_ms), (red, green, blue, _) in zip(plan.blocks, spans, shades, strict=True):
        if length_ms >= room_ms:
            bright = 0.3 * red + 0.59 * green + 0.11 * blue > 0.5
            place, words = (start_ms + length_ms / 2, _LANE_HEIGHT / 2), f"{block.size_bytes / 1e6:.1f}"
            axes.text(*place, words, ha="center", va="center", fontsize=8, color="black" if bright else "white")


def draw_bound(axes: Any, bound_ns: float) -> None:
    axes.axvline(bound_ns / 1e6, color=INK, linestyle="--", linewidth=1.2)


def draw_key(figure: Any, axes: Any, colours: Any, *, plans: list[_core.Plan], schedules: str) -> None:
    """Explains colours, hatches and the dashed line. ``schedules``: those that the bound is over."""
    hook = all(plan.mode == "hook" for plan in plans)
    bar = figure.colorbar(colours, ax=axes, pad=0.015, fraction=0.025)
    # In hook mode all blocks are needed before forward begins; the colour still tells which gradients they hold.
    meaning = "ms of forward before\nits first use" if hook else "ms of forward until\na block is first used"
    bar.set_label(meaning, fontsize=8)
    bar.ax.tick_params(labelsize=8)
    handles: list[Artist] = [
        Patch(facecolor=BACKWARD, label="backward"),
        Patch(facecolor=FORWARD, label="forward"),
        Patch(facecolor=WAIT, label="forward waits"),
    ]
    ops = {block.op for plan in plans for block in plan.blocks}
    handles += [
        Patch(facecolor="white", edgecolor=FAINT, hatch=hatch, label=op.replace("_", "-"))
        for op, hatch in _HATCHES.items()
        if op in ops
    ]
    label = f"no {schedules} can end earlier"
    handles.append(plt.Line2D([], [], color=INK, linestyle="--", linewidth=1.2, label=label))
    legend_below(figure, handles)
