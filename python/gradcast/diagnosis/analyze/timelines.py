"""One step on every rank, measured and predicted, as the HTML report draws it.

Times are ms from the start of backward; for measured steps, from that of the rank that began first. A step is shown
from its backward pass to the end of the next forward pass, as ``play`` models it.
"""

from collections.abc import Sequence
from typing import Any

from gradcast import _core
from gradcast.diagnosis.trace.merged import BlockSpan, RankTrace
from gradcast.intervals import busy_periods_ns

_MS = 1e6


def measured(ranks: Sequence[RankTrace]) -> list[dict[str, Any]]:
    """Returns the key "timeline" of doctor.json: the last step that all ranks have completed, from aligned traces."""
    number = _shown_step(ranks)
    if number is None:
        return []
    steps = [next(step for step in rank.steps if step.number == number) for rank in ranks]
    zero_ns = min(step.start_ns for step in steps)
    found = []
    for rank, step in zip(ranks, steps, strict=True):
        spans = [span for span in rank.spans if span.end_ns > step.start_ns and span.start_ns < step.end_ns]
        blocks = []
        for block in _blocks(rank, number):
            tensors = rank.table[block.entry]["tensors"]
            fields = _block_fields(block.block, rank.table[block.entry]["bytes"], block, zero_ns)
            blocks.append(fields | {"first": tensors[0], "last": tensors[-1]})
        found.append({"rank": rank.rank, "spans": [_span_fields(*span, zero_ns) for span in spans], "blocks": blocks})
    return found


def _shown_step(ranks: Sequence[RankTrace]) -> int | None:
    common = set.intersection(*({step.number for step in rank.steps[:-1]} for rank in ranks)) if ranks else set()
    return max((number for number in common if all(_blocks(rank, number) for rank in ranks)), default=None)


def predicted(profile: _core.Profile, plan: _core.Plan) -> dict[str, Any]:
    """Returns the key "predicted_timeline" of doctor.json, as ``play`` predicts it."""
    timeline = _core.play(profile, profile.link, plan)
    clock_ns = timeline.forward_start_ns
    spans = [("backward", 0.0, profile.backward_ns), ("wait", profile.backward_ns, clock_ns)]
    for times in timeline.tensors:
        if times.wait_ns > 0:
            arrived_ns = times.read_ns + times.wait_ns
            spans += [("forward", clock_ns, times.read_ns), ("wait", times.read_ns, arrived_ns)]
            clock_ns = arrived_ns
    spans.append(("forward", clock_ns, timeline.iteration_ns))
    return {
        "spans": [_span_fields(*span) for span in spans if span[2] > span[1]],
        "blocks": [
            _block_fields(number, block.size_bytes, times)
            for number, (block, times) in enumerate(zip(plan.blocks, timeline.blocks, strict=True))
        ],
    }


def _span_fields(kind: str, start_ns: float, end_ns: float, zero_ns: float = 0) -> dict[str, Any]:
    return {"kind": kind, "start_ms": _ms(start_ns - zero_ns), "end_ms": _ms(end_ns - zero_ns)}


def _block_fields(number: int, size_bytes: int, times: Any, zero_ns: float = 0) -> dict[str, Any]:
    instants = {f"{name}_ms": _ms(getattr(times, f"{name}_ns") - zero_ns) for name in ("ready", "launch", "finish")}
    return {"block": number, "bytes": size_bytes, **instants}


def bandwidth(rank: RankTrace) -> list[dict[str, Any]]:
    """Returns the key "bandwidth" of doctor.json: each step's bytes over the time in which any block was in flight."""
    found = []
    for step in rank.steps:
        blocks = _blocks(rank, step.number)
        busy_ns = sum(busy_periods_ns((block.launch_ns, block.finish_ns) for block in blocks))
        if busy_ns > 0:
            size_bytes = sum(rank.table[block.entry]["bytes"] for block in blocks)
            at_ms = _ms(step.start_ns - rank.steps[0].start_ns)
            found.append({"step": step.number, "at_ms": at_ms, "gbit_per_s": 8 * size_bytes / busy_ns})
    return found


def _blocks(rank: RankTrace, number: int) -> list[BlockSpan]:
    return [block for block in rank.blocks if block.step == number]


def _ms(time_ns: float) -> float:
    return round(time_ns / _MS, 3)
