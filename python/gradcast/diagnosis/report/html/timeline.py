"""One step that followed the plan, on every rank: compute above, blocks on the link below."""

from typing import Any

from gradcast.diagnosis.report.html import axes, components, values
from gradcast.diagnosis.report.html.axes import LEFT, Scale, ticks
from gradcast.diagnosis.report.html.markup import Markup, element
from gradcast.diagnosis.runs import SPAN_KINDS
from gradcast.diagnosis.trace.merged import in_lanes
from gradcast.units import format_size

_COMPUTE, _LINK, _GAP = 18.0, 15.0, 14.0
# In the order in which spans are drawn: updates and waits happen inside forward, and are drawn over it.
_COLOURS = dict(zip(SPAN_KINDS, ("p-forward", "p-backward", "p-update", "p-waiting"), strict=True))
_NAME_MAX = 64


def draw(run: dict[str, Any]) -> list[Markup]:
    ranks, plan = run["timeline"], run.get("predicted_timeline")
    slow = (run.get("straggler") or {}).get("rank")
    # The first ranks, and always the slow one.
    shown = components.some_ranks(ranks, lambda rank: (rank["rank"] != slow, rank["rank"]))
    rows = [("plan", plan)] if plan else []
    rows += [(f"rank {rank['rank']}", rank) for rank in shown]
    spans, blocks = ([each for _, row in rows for each in row[key]] for key in ("spans", "blocks"))
    times_ms = [span[key] for span in spans for key in ("start_ms", "end_ms")]
    times_ms += [block[key] for block in blocks for key in ("launch_ms", "finish_ms")]
    low, high = min([0.0, *times_ms]), max([1e-3, *times_ms])
    scale = Scale(low, high)
    drawn, y = [], 10.0
    for name, row in rows:
        made, height = _row(name, row, y, scale)
        drawn.append(made)
        y += height + _GAP
    label = f"Timeline of one step on {values.plural(len(shown), 'rank')}: compute above, blocks on the link below."
    axis = axes.bottom_axis(scale, ticks(low, high, 10), y - 4, 6, "ms from the start of the step")
    left_out = len(ranks) - len(shown)
    others = f" {values.plural(left_out, 'more rank')} in the trace of the run." if left_out else ""
    caption = f"Clocks are aligned. Compute is above; the blocks of the plan, by number, are below.{others}"
    kinds = {span["kind"] for span in spans}
    colours = [(class_, kind) for kind, class_ in _COLOURS.items() if kind in kinds]
    return [
        components.key([*colours, ("block", "block on the link")]),
        axes.figure(y + 36, label, caption, axis, drawn),
        _blocks(shown[0], plan),
    ]


def _row(name: str, row: dict[str, Any], y: float, scale: Scale) -> tuple[Markup, float]:
    lanes = in_lanes(row["blocks"], lambda block: (block["launch_ms"], block["finish_ms"]))
    top = y + _COMPUTE + 2
    order = list(_COLOURS)
    drawn = [_span(name, span, y, scale) for span in sorted(row["spans"], key=lambda span: order.index(span["kind"]))]
    for lane, blocks in enumerate(lanes):
        drawn += [_block(name, block, top + lane * (_LINK + 1), scale) for block in blocks]
    height = _COMPUTE + 2 + max(1, len(lanes)) * (_LINK + 1)
    words = axes.text(LEFT - 10, y + height / 2 + 4, name, "end", "name shown" if name == "plan" else "name")
    return element("g", words, drawn), height


def _span(name: str, span: dict[str, Any], y: float, scale: Scale) -> Markup:
    start, end = span["start_ms"], span["end_ms"]
    words = f"{name}: {span['kind']} {values.ms(end - start)}, from {values.ms(start)}"
    return axes.bar(scale(start), y, scale(end) - scale(start), _COMPUTE, words, _COLOURS[span["kind"]])


def _block(name: str, block: dict[str, Any], y: float, scale: Scale) -> Markup:
    start, end = block["launch_ms"], block["finish_ms"]
    # Predicted blocks have no tensor names.
    names = f", {_tensors(block)}" if block.get("first") else ""
    words = (
        f"{name}: block {block['block']}, {format_size(block['bytes'])}{names}; "
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


def _blocks(first: dict[str, Any], plan: dict[str, Any] | None) -> Markup:
    """A table of the blocks on the first rank; a block ends on all ranks when the last rank has joined."""
    planned = {(block["block"], block["bytes"]): block for block in (plan or {}).get("blocks", [])}
    rows = []
    for block in first["blocks"]:
        predicted = planned.get((block["block"], block["bytes"]))
        times_ms = [block["ready_ms"], block["launch_ms"], block["finish_ms"], block["finish_ms"] - block["launch_ms"]]
        times_ms.append(predicted and predicted["finish_ms"] - predicted["launch_ms"])
        names = _tensors(block)
        # A long name, such as a whole configuration, is shortened to its beginning and end.
        short = names if len(names) <= _NAME_MAX else f"{names[: _NAME_MAX // 2]} … {names[-_NAME_MAX // 2 :]}"
        name = element("span", short, title=names)
        rows.append([block["block"], name, format_size(block["bytes"]), *map(values.ms, times_ms)])
    headers = ["block", "tensors", "size", "ready", "launched", "finished", "duration", "predicted"]
    return components.table(headers, rows, "rlrrrrrr", f"The blocks on rank {first['rank']}")
