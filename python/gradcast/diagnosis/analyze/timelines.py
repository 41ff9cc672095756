"""One step on every rank, measured and predicted, as the HTML report draws it.

Times are ms from the start of backward; for measured steps, from that of the rank that began first. A step is shown
from its backward pass to the end of the next forward pass, as ``play`` models it.

Pure. Thread safety: pure; any thread.
"""

from collections.abc import Sequence
from typing import Any

from gradcast import _core
from gradcast.diagnosis.trace.merged import BlockSpan, RankTrace
from gradcast.intervals import busy_periods_ns

_MS = 1e6


def shown_step(ranks: Sequence[RankTrace]) -> int | None:
    """Returns the number of the last step that is complete on every rank, or None if there is none."""
    common = set.intersection(*({step.number for step in rank.steps[:-1]} for rank in ranks)) if ranks else set()
    whole = [number for number in common if all(_blocks(rank, number) for rank in ranks)]
    return max(whole, default=None)


def measured(ranks: Sequence[RankTrace]) -> list[dict[str, Any]]:
    """Returns the key "timeline" of doctor.json. The traces are on one clock."""
    number = shown_step(ranks)
    if number is None:
        return []
    steps = [next(step for step in rank.steps if step.number == number) for rank in ranks]
    zero_ns = min(step.start_ns for step in steps)

    def at(time_ns: int) -> float:
        return round((time_ns - zero_ns) / _MS, 3)

    found = []
    for rank, step in zip(ranks, steps, strict=True):
        spans = [span for span in rank.spans if span.end_ns > step.start_ns and span.start_ns < step.end_ns]
        blocks = [
            {
                "block": block.block,
                "bytes": rank.table[block.entry]["bytes"],
                "ready_ms": at(block.ready_ns),
                "launch_ms": at(block.launch_ns),
                "finish_ms": at(block.finish_ns),
                "first": rank.table[block.entry]["tensors"][0],
                "last": rank.table[block.entry]["tensors"][-1],
            }
            for block in _blocks(rank, number)
        ]
        shown = [{"kind": s.kind, "start_ms": at(s.start_ns), "end_ms": at(s.end_ns)} for s in spans]
        found.append({"rank": rank.rank, "spans": shown, "blocks": blocks})
    return found


def predicted(profile: _core.Profile, plan: _core.Plan) -> dict[str, Any]:
    """Returns the key "predicted_timeline" of doctor.json, as ``play`` predicts it."""
    timeline = _core.play(profile, profile.link, plan)
    spans = [("backward", 0.0, profile.backward_ns)]
    clock_ns = timeline.forward_start_ns
    if clock_ns > profile.backward_ns:
        spans.append(("wait", profile.backward_ns, clock_ns))
    for times in timeline.tensors:
        if times.wait_ns > 0:
            arrived_ns = times.read_ns + times.wait_ns
            spans += [("forward", clock_ns, times.read_ns), ("wait", times.read_ns, arrived_ns)]
            clock_ns = arrived_ns
    spans.append(("forward", clock_ns, timeline.iteration_ns))
    return {
        "spans": [
            {"kind": kind, "start_ms": round(start / _MS, 3), "end_ms": round(end / _MS, 3)}
            for kind, start, end in spans
            if end > start
        ],
        "blocks": [
            {
                "block": number,
                "bytes": block.size_bytes,
                "ready_ms": round(times.ready_ns / _MS, 3),
                "launch_ms": round(times.launch_ns / _MS, 3),
                "finish_ms": round(times.finish_ns / _MS, 3),
            }
            for number, (block, times) in enumerate(zip(plan.blocks, timeline.blocks, strict=True))
        ],
    }


def bandwidth(rank: RankTrace) -> list[dict[str, Any]]:
    """Returns the key "bandwidth" of doctor.json: each step's bytes over the time in which any block was in flight."""
    found = []
    for step in rank.steps:
        blocks = _blocks(rank, step.number)
        busy_ns = sum(busy_periods_ns((block.launch_ns, block.finish_ns) for block in blocks))
        if busy_ns == 0:
            continue
        size_bytes = sum(rank.table[block.entry]["bytes"] for block in blocks)
        at_ms = round((step.start_ns - rank.steps[0].start_ns) / _MS, 3)
        found.append({"step": step.number, "at_ms": at_ms, "gbit_per_s": 8 * size_bytes / busy_ns})
    return found


def _blocks(rank: RankTrace, number: int) -> list[BlockSpan]:
    return [block for block in rank.blocks if block.step == number]
