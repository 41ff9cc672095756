"""The host's own time where it runs ahead of a device: per step, per part of the optimizer's step, and per block.

Events of a device hide this time while the device is behind. So it is measured by the host's clock, on the thread that
trains. Waits do not count, nor does what the program does between ``step()`` and forward: the host may wait for the
device there, in ways that are not seen.
"""

import statistics
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from gradcast.training.measure.step_trace import StepRecord

_PROBES = 5


class HostTimes(NamedTuple):
    """``step_ns``: of a step with one part, without blocks. ``part_ns``: of each further part. ``block_ns``: of each
    block. All 0 where the host computes itself."""

    step_ns: float = 0.0
    part_ns: float = 0.0
    block_ns: float = 0.0


NO_HOST_TIMES = HostTimes()


class HostStep(NamedTuple):
    """The thread's own work in a step: in forward and backward without updates, and in ``parts`` of an update."""

    passes_ns: float
    update_ns: float
    parts: int


def host_step(record: StepRecord) -> HostStep:
    """REQUIRES: the next backward pass begins."""
    passes = [(start, end) for name, start, end in record.spans if name in ("forward", "backward")]
    others = [(start, end) for name, start, end in record.spans if name in ("wait", "update")]
    inside_ns = sum(max(0, min(end, last) - max(start, first)) for start, end in others for first, last in passes)
    passes_ns = sum(end - start for start, end in passes) - inside_ns
    return HostStep(passes_ns, record.total_ns("update"), max(1, record.update_calls))


def host_times(steps: Sequence[HostStep], block_ns: float) -> HostTimes:
    """The times that these steps show. Disturbed steps are longer, so the shortest ones count."""
    if not steps:
        return NO_HOST_TIMES
    part_ns = cost_of_a_part((each.parts, each.update_ns) for each in steps)
    step_ns = min(each.passes_ns for each in steps)
    update_ns = min(max(0.0, each.update_ns - part_ns * (each.parts - 1)) for each in steps)
    return HostTimes(step_ns + update_ns, part_ns, block_ns)


def cost_of_a_part(updates: Iterable[tuple[int, float]]) -> float:
    """The cost of each part of an update beyond the first, from steps that have updated the same in more parts than
    others, two of each kind at least; 0 if they do not show it. ``updates``: the parts and the time of each step."""
    by_parts: dict[int, list[float]] = {}
    for parts, update_ns in updates:
        by_parts.setdefault(parts, []).append(update_ns)
    shortest_ns = {parts: min(times) for parts, times in by_parts.items() if len(times) > 1}
    if len(shortest_ns) < 2:
        return 0.0
    fewest, most = min(shortest_ns), max(shortest_ns)
    return max(0.0, shortest_ns[most] - shortest_ns[fewest]) / (most - fewest)


def block_ns(device: torch.device) -> float:
    """The host's time for the event behind a block's gradients and the wait for its end."""
    if device.type != "cuda":
        return 0.0
    stream, times = torch.cuda.current_stream(device), []
    for _ in range(_PROBES):
        start_ns = time.perf_counter_ns()
        event = torch.cuda.Event()
        event.record(stream)
        stream.wait_event(event)
        times.append(time.perf_counter_ns() - start_ns)
    return statistics.median(times)
