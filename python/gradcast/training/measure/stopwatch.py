"""When gradients become ready and parameters are read: the stamps of the warm-up steps, and their medians.

A step runs from the start of one backward pass to the start of the next. `forward` is everything in it but backward and
the update: the loop's own work and loading data delay the next read like compute does, and the network works meanwhile.
Times of reads are counted from the end of backward, with waiting for gradients and the update taken out.

On CUDA, stamps are events on the current stream, since the host runs ahead of the device. (That path has not run on a
GPU.)
"""

import contextlib
import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gradcast.training.measure.compute_cost import Compute
from gradcast.training.measure.measurement import Measurement
from gradcast.training.measure.network_cost import BlockDuration

_PACK_PROBE_ELEMENTS = 1 << 20
_PACK_PROBES = 5


class HostClock:
    def stamp(self) -> int:
        return time.perf_counter_ns()

    def between(self, start: int, end: int) -> float:
        return float(end - start)


class DeviceClock:
    """``device``: the module's, which need not be the calling thread's current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stamp(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, start: Any, end: Any) -> float:
        end.synchronize()
        return start.elapsed_time(end) * 1e6


@dataclasses.dataclass
class _Step:
    backward_start: Any
    ready: dict[int, Any] = dataclasses.field(default_factory=dict)
    used: set[int] = dataclasses.field(default_factory=set)  # of which autograd has made a gradient
    need: dict[int, Any] = dataclasses.field(default_factory=dict)
    watched: bool = False  # reads of the forward pass are noted
    backward_end: Any = None
    waits: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)
    updates: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)
    next_backward: Any = None

    @property
    def complete(self) -> bool:
        """Not where backward has failed, or the next one has not begun."""
        return self.backward_end is not None and self.next_backward is not None


class Stopwatch:
    """Takes the stamps of one rank. One object per warm-up."""

    def __init__(self, device: torch.device, parameter_count: int) -> None:
        self._clock = DeviceClock(device) if device.type == "cuda" else HostClock()
        self._parameter_count = parameter_count
        self._steps: list[_Step] = []
        self._forward_end: Any = None

    def forward_ended(self) -> None:
        self._forward_end = self._clock.stamp()

    def backward_started(self) -> None:
        """At the first gradient. Backward is taken to have started where forward ended, where that is known."""
        start = self._forward_end if self._forward_end is not None else self._clock.stamp()
        self._forward_end = None
        if self._steps:
            self._steps[-1].next_backward = start
        self._steps.append(_Step(start))

    def ready(self, index: int, *, used: bool) -> None:
        """``used``: autograd has made the gradient, nobody has put zeros in its place."""
        self._steps[-1].ready[index] = self._clock.stamp()
        if used:
            self._steps[-1].used.add(index)

    def backward_ended(self) -> None:
        self._steps[-1].backward_end = self._clock.stamp()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around waiting for gradients, which a plan may avoid: no part of compute."""
        start = self._clock.stamp()
        yield
        if self._steps:
            self._steps[-1].waits.append((start, self._clock.stamp()))

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Around the optimizer's work."""
        start = self._clock.stamp()
        yield
        if self._steps:
            self._steps[-1].updates.append((start, self._clock.stamp()))

    def watching(self) -> None:
        """A forward pass begins whose reads are noted."""
        if self._steps:
            self._steps[-1].watched = True

    def read(self, index: int) -> None:
        if self._steps:
            self._steps[-1].need.setdefault(index, self._clock.stamp())

    def unseen_reads(self) -> set[int]:
        """Whose gradients show that forward has used them, though no read was noted: so reads a C++ extension, and so
        does a view that was kept."""
        pairs = itertools.pairwise(self._steps)
        return {index for before, step in pairs if before.watched for index in step.used - before.need.keys()}

    def pack_ns_per_byte(self, flats: Sequence[torch.Tensor]) -> float:
        """What it costs to pack and unpack a block of several ranges: to copy its bytes out and back."""
        if not flats:
            return 0.0
        part = max(flats, key=torch.numel)[:_PACK_PROBE_ELEMENTS]
        times = []
        for _ in range(_PACK_PROBES):
            start = self._clock.stamp()
            part.copy_(part.clone())
            times.append(self._clock.between(start, self._clock.stamp()))
        return statistics.median(times) / (part.numel() * part.element_size())

    def medians(
        self, block_bytes: list[list[int]], blocks: list[list[BlockDuration]], pack_ns_per_byte: float
    ) -> Measurement:
        """Of all complete steps but the first, in which memory is allocated. A median forgets a disturbed step."""
        compute = [self._compute(step) for step in self._steps[1:]]
        steps = [step for step in self._steps[1:] if step.complete]
        since_backward = [functools.partial(self._since, step.backward_end, self._pause_ns(step)) for step in steps]
        ready_ns, need_ns = [], []
        for index in range(self._parameter_count):
            ready = [self._clock.between(s.backward_start, s.ready[index]) for s in steps if index in s.ready]
            ready_ns.append(max(0.0, statistics.median(ready)) if ready else 0.0)
            need = [since(s.need[index]) for s, since in zip(steps, since_backward, strict=True) if index in s.need]
            # Never read as far as anybody saw: not urgent, or among the unseen.
            need_ns.append(statistics.median(need) if need else float("inf"))
        return Measurement(
            ready_ns=ready_ns,
            need_ns=need_ns,
            compute=compute,
            block_bytes=block_bytes,
            blocks=blocks,
            pack_ns_per_byte=pack_ns_per_byte,
            unseen_reads=sorted(self.unseen_reads()),
        )

    def _compute(self, step: _Step) -> Compute | None:
        if not step.complete:
            return None
        return Compute(
            backward_ns=self._clock.between(step.backward_start, step.backward_end),
            forward_ns=self._since(step.backward_end, self._pause_ns(step), step.next_backward),
            update_ns=self._total_ns(step.updates),
        )

    def _pause_ns(self, step: _Step) -> float:
        """Before forward reads anything: what is taken out of the time since backward."""
        return self._total_ns(step.waits) + self._total_ns(step.updates)

    def _since(self, backward_end: Any, pause_ns: float, stamp: Any) -> float:
        return max(0.0, self._clock.between(backward_end, stamp) - pause_ns)

    def _total_ns(self, spans: list[tuple[Any, Any]]) -> float:
        return sum(self._clock.between(start, end) for start, end in spans)
