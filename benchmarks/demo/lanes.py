"""One step as two lanes over time, from the start of backward to the start of the next backward.

Three sources, one shape: DDP by the clock, gradcast by its own timeline, and what gradcast's plan predicted.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import gradcast

BACKWARD, FORWARD, UPDATE, WAIT = "backward", "forward", "update", "wait"
_DRAWN = {BACKWARD, FORWARD, UPDATE, WAIT}


@dataclass(frozen=True)
class Span:
    start_ms: float
    end_ms: float
    kind: str = ""  # of compute


@dataclass(frozen=True)
class Block:
    start_ms: float
    end_ms: float
    size_bytes: int


@dataclass(frozen=True)
class Lanes:
    compute: list[Span]  # where they overlap, the later ones of the list are on top
    link: list[Block]
    end_ms: float


def of_ddp(steps: list[dict[str, Any]], typical_ms: float) -> Lanes:
    """The most typical of the traced steps; not the first two, since DDP lays out its buckets anew after the first."""
    windows = list(itertools.pairwise(steps[2:]))
    lengths_ms = [(following["backward_ns"] - step["backward_ns"]) / 1e6 for step, following in windows]
    step, following = _nearest(windows, lengths_ms, typical_ms)
    start_ns = step["backward_ns"]

    def ms(time_ns: int) -> float:
        return (time_ns - start_ns) / 1e6

    # The last bucket goes when the last gradient is there: from then on, backward only waits.
    computed_ms = max(ms(launch_ns) for launch_ns, _, _ in step["buckets"])
    compute = [
        Span(0, computed_ms, BACKWARD),
        Span(computed_ms, ms(step["update_ns"]), WAIT),
        Span(ms(step["update_ns"]), ms(step["end_ns"]), UPDATE),
        Span(ms(following["forward_ns"]), ms(following["backward_ns"]), FORWARD),
    ]
    link = [Block(ms(launch_ns), ms(finish_ns), size_bytes) for launch_ns, finish_ns, size_bytes in step["buckets"]]
    return Lanes(compute, link, ms(following["backward_ns"]))


def of_timeline(trace: dict[str, Any], typical_ms: float) -> Lanes:
    """The most typical step of those that a handle has recorded."""
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    starts: dict[int, float] = {}
    for event in events:
        if event["cat"] == BACKWARD:
            step = event["args"]["step"]
            starts[step] = min(event["ts"], starts.get(step, event["ts"]))
    windows = [(starts[step], starts[step + 1]) for step in sorted(starts) if step + 1 in starts]
    begin_us, end_us = _nearest(windows, [(end - begin) / 1e3 for begin, end in windows], typical_ms)

    def place(event: dict[str, Any]) -> tuple[float, float]:
        return (event["ts"] - begin_us) / 1e3, (event["ts"] + event["dur"] - begin_us) / 1e3

    inside = [event for event in events if begin_us <= event["ts"] < end_us]
    compute = [Span(*place(event), event["cat"]) for event in inside if event["cat"] in _DRAWN]
    compute.sort(key=lambda span: span.kind in (UPDATE, WAIT))  # forward is drawn as one span below them
    link = [Block(*place(event), event["args"]["bytes"]) for event in inside if event["cat"] == "block"]
    return Lanes(compute, link, (end_us - begin_us) / 1e3)


def of_plan(profile: gradcast.Profile, plan: gradcast.Plan) -> Lanes:
    """What ``play`` says about the plan, on the profile that it was made for."""
    assert profile.link is not None
    timeline = gradcast.play(profile, profile.link, plan)
    backward_ms, end_ms = profile.backward_ns / 1e6, timeline.iteration_ns / 1e6
    compute = [Span(0, backward_ms, BACKWARD), Span(backward_ms, end_ms, FORWARD)]
    for tensor, times in zip(profile.tensors, timeline.tensors, strict=True):
        read_ms, wait_ms = times.read_ns / 1e6, times.wait_ns / 1e6
        compute.append(Span(read_ms, read_ms + wait_ms, WAIT))
        compute.append(Span(read_ms + wait_ms, read_ms + wait_ms + tensor.update_ns / 1e6, UPDATE))
    link = []
    free_ns = 0.0
    for block, times in zip(plan.blocks, timeline.blocks, strict=True):
        start_ns = max(times.launch_ns, free_ns)  # one wire, in the order of launches
        link.append(Block(start_ns / 1e6, times.finish_ns / 1e6, block.size_bytes))
        free_ns = times.finish_ns
    return Lanes(compute, link, end_ms)


def _nearest(items: list[Any], lengths_ms: list[float], typical_ms: float) -> Any:
    """The item whose length is nearest to what is typical, which is the median of all steps in the table."""
    if not items:
        raise gradcast.Error("no whole step was recorded, so there is none to draw; train more steps")
    return items[min(range(len(items)), key=lambda index: abs(lengths_ms[index] - typical_ms))]
