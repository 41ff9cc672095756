"""One step that followed the plan, on every rank: compute above, blocks on the link below."""

from typing import Any

from gradcast.diagnosis.report.html import axes, components, values
from gradcast.diagnosis.report.html.axes import LEFT, RIGHT, WIDTH, Scale, ticks
from gradcast.diagnosis.report.html.markup import Markup, element
from gradcast.diagnosis.trace.lanes import in_lanes

_COMPUTE, _LINK, _GAP = 18.0, 15.0, 14.0
# In the order in which spans are drawn: updates and waits happen inside forward, and are drawn over it.
_COLOURS = {"forward": "p-forward", "backward": "p-backward", "update": "p-update", "wait": "p-waiting"}
_NAME_MAX = 64


def draw(run: dict[str, Any]) -> Markup:
    heading = "One step on every rank"
    ranks = run.get("timeline") or []
    if not ranks:
        why = "No step followed a plan in this run, so there is no timeline."
        return components.untried(run, "timeline", heading, why)
    slow = (run.get("straggler") or {}).get("rank")
    # The first ranks, and always the slow one.
    shown = components.some_ranks(ranks, lambda rank: (rank["rank"] != slow, rank["rank"]))
    rows = [(f"rank {rank['rank']}", rank) for rank in shown]
    if run.get("predicted_timeline"):
        rows.insert(0, ("plan", run["predicted_timeline"]))
    times_ms = [ms for _, row in rows for span in row["spans"] for ms in (span["start_ms"], span["end_ms"])]
    times_ms += [ms for _, row in rows for block in row["blocks"] for ms in (block["launch_ms"], block["finish_ms"])]
    low, high = min([0.0, *times_ms]), max([1e-3, *times_ms])
    scale = Scale(low, high, LEFT, WIDTH - RIGHT)
    drawn, y = [], 10.0
    for name, row in rows:
        made, height = _row(name, row, y, scale)
        drawn.append(made)
        y += height + _GAP
    label = f"Timeline of one step on {values.plural(len(shown), 'rank')}: compute above, blocks on the link below."
    axis = axes.bottom_axis(scale, ticks(low, high, 10), y - 4, 6, "ms from the start of the step")
    kinds = {span["kind"] for _, row in rows for span in row["spans"]}
    colours = [(_COLOURS[kind], kind) for kind in _COLOURS if kind in kinds]
    left_out = len(ranks) - len(shown)
    others = f" {values.plural(left_out, 'more rank')} in the trace of the run." if left_out else ""
    caption = f"Clocks are aligned. Compute is above; the blocks of the plan, by number, are below.{others}"
    return components.section(
        "timeline",
        heading,
        components.key([*colours, ("block", "block on the link")]),
        components.figure(axes.svg(y + 36, label, axis, drawn), caption),
        _blocks(shown, run.get("predicted_timeline")),
    )


def _row(name: str, row: dict[str, Any], y: float, scale: Scale) -> tuple[Markup, float]:
    lanes = in_lanes(row["blocks"], lambda block: (block["launch_ms"], block["finish_ms"]))
    top = y + _COMPUTE + 2
    order = list(_COLOURS)
    made = [_span(name, span, y, scale) for span in sorted(row["spans"], key=lambda span: order.index(span["kind"]))]
    for lane, blocks in enumerate(lanes):
        made += [_block(name, block, top + lane * (_LINK + 1), scale) for block in blocks]
    height = _COMPUTE + 2 + max(1, len(lanes)) * (_LINK + 1)
    words = axes.text(LEFT - 10, y + height / 2 + 4, name, "end", "name shown" if name == "plan" else "name")
    return element("g", words, *made), height


def _span(name: str, span: dict[str, Any], y: float, scale: Scale) -> Markup:
    start, end = span["start_ms"], span["end_ms"]
    words = f"{name}: {span['kind']} {values.ms(end - start)}, from {values.ms(start)}"
    return axes.bar(scale(start), y, scale(end) - scale(start), _COMPUTE, words, _COLOURS[span["kind"]])


def _block(name: str, block: dict[str, Any], y: float, scale: Scale) -> Markup:
    start, end = block["launch_ms"], block["finish_ms"]
    # Predicted blocks have no tensor names.
    names = f", {_tensors(block)}" if block.get("first") else ""
    words = (
        f"{name}: block {block['block']}, {values.size(block['bytes'])}{names}; "
        f"ready {values.ms(block['ready_ms'])}, launched {values.ms(start)}, finished {values.ms(end)}"
    )
    width = scale(end) - scale(start)
    label = str(block["block"])
    # Blocks are separated by empty space, which is visible in every colour scheme.
    drawn = axes.bar(scale(start), y, width - 1 if width > 3 else width, _LINK, words, "block")
    if width < axes.LETTER * len(label) + 4:
        return drawn
    return element("g", drawn, axes.text(scale(start) + width / 2, y + 11.5, label, "middle", "inside small"))


def _tensors(block: dict[str, Any]) -> str:
    first, last = block["first"], block["last"]
    return first if first == last else f"{first} … {last}"


def _short(name: str) -> str:
    """Shortens a long name, such as a whole configuration, to its beginning and end."""
    return name if len(name) <= _NAME_MAX else f"{name[: _NAME_MAX // 2]} … {name[-_NAME_MAX // 2 :]}"


def _blocks(ranks: list[dict[str, Any]], predicted: dict[str, Any] | None) -> Markup:
    """A table of the blocks on the first rank; a block ends on all ranks when the last rank has joined."""
    first = ranks[0]
    planned = {block["block"]: block for block in (predicted or {}).get("blocks", [])}
    rows = []
    for block in first["blocks"]:
        plan = planned.get(block["block"])
        same = plan is not None and plan["bytes"] == block["bytes"]
        predicted_ms = plan["finish_ms"] - plan["launch_ms"] if same else None
        name = element("span", _short(_tensors(block)), title=_tensors(block))
        times = [block["ready_ms"], block["launch_ms"], block["finish_ms"], block["finish_ms"] - block["launch_ms"]]
        shown = [values.ms(time_ms) for time_ms in [*times, predicted_ms]]
        rows.append([block["block"], name, values.size(block["bytes"]), *shown])
    headers = ["block", "tensors", "size", "ready", "launched", "finished", "duration", "predicted"]
    return components.table(headers, rows, "rlrrrrrr", f"The blocks on rank {first['rank']}")
