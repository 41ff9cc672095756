"""One step on every rank, as it was and as it was predicted, for people to look at.

Times are ms from the start of backward; on the ranks, from that of the rank that began first. A step is shown from its
backward pass to the end of the next forward pass, as ``play`` has it.

Pure. Thread safety: pure; any thread.
"""

import itertools
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from gradcast import _core
from gradcast.diagnosis.trace.merged import BlockSpan, RankTrace

_MS = 1e6
# Of a version, before any counts: in its first step blocks of the one before it still arrive.
_SETTLING_STEPS = 2


class FollowedStep(NamedTuple):
    """``step``: its number; ``version``: of the plan that it followed."""

    step: int
    version: int
    plan: _core.Plan
    ms: float
    predicted_ns: float  # of a step with this plan


def versions(steps: Sequence[FollowedStep]) -> list[dict[str, Any]]:
    """What each version of the plan promised, and what its steps took in the median."""
    found = []
    for version, members in itertools.groupby(steps, key=lambda step: step.version):
        made = list(members)
        plan = made[0].plan
        found.append(
            {
                "version": version,
                "from_step": made[0].step,
                "policy": plan.policy,
                "blocks": len(plan.blocks),
                "predicted_ms": made[-1].predicted_ns / _MS,
                "measured_ms": statistics.median(step.ms for step in made[_SETTLING_STEPS:] or made),
            }
        )
    return found


def shown_step(ranks: Sequence[RankTrace]) -> int | None:
    """The last step of which every rank knows all blocks and what follows it; None where there is none."""
    common = set.intersection(*({step.number for step in rank.steps[:-1]} for rank in ranks)) if ranks else set()
    whole = [number for number in common if all(_blocks(rank, number) for rank in ranks)]
    return max(whole, default=None)


def measured(ranks: Sequence[RankTrace]) -> list[dict[str, Any]]:
    """``ranks``: on one clock."""
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
    """By ``play``."""
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
    """Of one rank's steps: bytes by the time in which any block was in flight."""
    found = []
    for step in rank.steps:
        blocks = _blocks(rank, step.number)
        busy_ns = _covered_ns([(block.launch_ns, block.finish_ns) for block in blocks])
        if busy_ns == 0:
            continue
        size_bytes = sum(rank.table[block.entry]["bytes"] for block in blocks)
        at_ms = round((step.start_ns - rank.steps[0].start_ns) / _MS, 3)
        found.append({"step": step.number, "at_ms": at_ms, "gbit_per_s": 8 * size_bytes / busy_ns})
    return found


def _blocks(rank: RankTrace, number: int) -> list[BlockSpan]:
    return [block for block in rank.blocks if block.step == number]


def _covered_ns(spans: Sequence[tuple[int, int]]) -> int:
    covered, reached = 0, 0
    for start, end in sorted(spans):
        covered += max(0, end - max(start, reached))
        reached = max(reached, end)
    return covered
