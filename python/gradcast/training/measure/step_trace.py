"""The record of the last steps: the work of the training thread and of the network.

Times are ns of time.perf_counter_ns, which the engine uses, too. While a device's compute is measured, each is also a
point of its current stream.
"""

import collections
import contextlib
import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from gradcast import _core
from gradcast.training.measure.clocks import Clock

_MS = 1e6
_COMPUTE_LANE, _LINK_LANE = 1, 2


class Stamp(int):
    """A time, in ns on the host. ``event``: a point of the device's stream."""

    event: Any

    @classmethod
    def at(cls, time_ns: int, event: Any) -> "Stamp":
        stamp = cls(time_ns)
        stamp.event = event
        return stamp


@dataclasses.dataclass
class StepRecord:
    """One step, from the start of backward to the start of the next.

    ``iteration``: the engine's number of the step. ``spans``: (category, start, end) of the training thread's work.
    """

    step: int
    iteration: int
    plan: _core.Plan
    profile: _core.Profile
    start_ns: int
    end_ns: int | None = None
    update_calls: int = 0
    spans: list[tuple[str, int, int]] = dataclasses.field(default_factory=list)

    def total_ns(self, category: str, clock: Clock | None = None) -> float:
        """``clock``: of the device; counts its work between stamps, and omits spans of the host alone."""
        spans = [(start, end) for name, start, end in self.spans if name == category]
        if clock is None:
            return sum(end - start for start, end in spans)
        stamps = [(start, end) for start, end in spans if isinstance(start, Stamp) and isinstance(end, Stamp)]
        return sum((clock.between(start.event, end.event) for start, end in stamps), 0.0)

    @property
    def backward_ns(self) -> int:
        """Time until backward() has returned; in hook mode that includes waiting for gradients."""
        ended_ns = max((end for name, _, end in self.spans if name == "backward"), default=self.start_ns)
        waited = [end for name, start, end in self.spans if name == "wait" and start == ended_ns]
        return max([ended_ns, *waited]) - self.start_ns


class StepTrace:
    """The last ``capacity`` steps. ``waited_ns``: the training thread's waiting in all steps until now."""

    def __init__(self, capacity: int) -> None:
        self._records: collections.deque[StepRecord] = collections.deque(maxlen=capacity)
        self.waited_ns = 0
        self.device_clock: Clock | None = None  # while the device is measured

    def now(self) -> int:
        now_ns = time.perf_counter_ns()
        return now_ns if self.device_clock is None else Stamp.at(now_ns, self.device_clock.stamp())

    def begin(self, record: StepRecord) -> None:
        self.end(record.start_ns)
        self._records.append(record)

    def end(self, end_ns: int) -> None:
        """Ends the current step, if it has not ended."""
        if self._records and self._records[-1].end_ns is None:
            self._records[-1].end_ns = end_ns

    @property
    def current(self) -> StepRecord | None:
        return self._records[-1] if self._records else None

    def span(self, category: str, start_ns: int, end_ns: int) -> None:
        self.waited_ns += end_ns - start_ns if category == "wait" else 0
        if self._records:
            self._records[-1].spans.append((category, start_ns, end_ns))

    @contextlib.contextmanager
    def timed(self, category: str) -> Iterator[None]:
        """Records a span around the block."""
        start_ns = self.now()
        yield
        self.span(category, start_ns, self.now())

    def count_update(self) -> None:
        if self._records:
            self._records[-1].update_calls += 1

    @property
    def complete(self) -> list[StepRecord]:
        return [record for record in self._records if record.end_ns is not None]

    def events(self, rank: int, iterations: Sequence[_core.IterationRecord]) -> list[dict[str, Any]]:
        """Chrome trace events of this rank's two lanes; ts and dur are in microseconds."""
        by_number = {record.iteration: record for record in iterations}
        events = [
            {"ph": "M", "pid": rank, "tid": lane, "name": kind, "args": {"name": name}}
            for lane, kind, name in (
                (0, "process_name", f"rank {rank}"),
                (_COMPUTE_LANE, "thread_name", "compute"),
                (_LINK_LANE, "thread_name", "link"),
            )
        ]
        for record in self._records:
            for name, start_ns, end_ns in record.spans:
                fields = {"tid": _COMPUTE_LANE, "name": name, "cat": name, "args": {"step": record.step}}
                events.append(fields | _span(rank, start_ns, end_ns))
            if record.iteration in by_number:
                events += _block_events(rank, record, by_number[record.iteration])
        return events


def median_ms(values: Sequence[float]) -> float | None:
    return statistics.median(values) / _MS if values else None


def tensor_names(profile: _core.Profile, block: _core.Block) -> list[str]:
    """The tensors that a block touches, in the order of the buffer."""
    names, offset = [], 0
    for tensor in profile.tensors:
        if tensor.buffer != block.buffer:
            continue
        if any(lo < offset + tensor.bytes and offset < hi for lo, hi in block.ranges):
            names.append(tensor.name)
        offset += tensor.bytes
    return names


def _block_events(rank: int, record: StepRecord, iteration: _core.IterationRecord) -> list[dict[str, Any]]:
    events = []
    for index, (block, times) in enumerate(zip(record.plan.blocks, iteration.blocks, strict=True)):
        if not times.finish_ns:
            continue
        names = tensor_names(record.profile, block)
        title = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        arguments = {
            "step": record.step,
            "block": index,
            "bytes": block.size_bytes,
            "tensors": names,
            "reason": block.reason,
            "ready_us": times.ready_ns / 1e3,
        }
        fields = {"tid": _LINK_LANE, "name": f"block {index}: {title}", "cat": "block", "args": arguments}
        events.append(fields | _span(rank, times.launch_ns, times.finish_ns))
    return events


def _span(rank: int, start_ns: int, end_ns: int) -> dict[str, Any]:
    return {"ph": "X", "pid": rank, "ts": start_ns / 1e3, "dur": (end_ns - start_ns) / 1e3}
