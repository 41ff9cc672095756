"""Times at which gradients become ready and parameters are read: stamps of the warm-up steps, and their medians.

A step runs from the start of one backward pass to the start of the next. `forward` is everything in it but backward and
the update: data loading and other work of the loop delay the next read as compute does, and the network works
meanwhile. Read times count from the end of backward, without waiting for gradients and without the update.
"""

import contextlib
import dataclasses
import functools
import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gradcast.training.measure.clocks import clock_of
from gradcast.training.measure.compute_cost import Compute
from gradcast.training.measure.host_cost import NO_HOST_TIMES, HostTimes, cost_of_a_part
from gradcast.training.measure.network_cost import Sample
from gradcast.training.measure.unseen_reads import UnseenRead

_PACK_PROBE_ELEMENTS = 1 << 20
_PACK_PROBES = 5


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One rank's measurements of the warm-up; times in ns.

    ``ready_ns``, ``need_ns``: median by parameter. ``compute``: by warm-up step, None if it could not be measured.
    ``blocks``: by warm-up step and block. ``unseen_reads``: by parameter whose reads no hook sees. ``part_ns``: cost
    of a call of an optimizer without its updates, where forward runs. ``host``: of a host that runs ahead of a device.
    """

    ready_ns: list[float]
    need_ns: list[float]
    compute: list[Compute | None]
    blocks: list[list[Sample]]
    pack_ns_per_byte: float
    unseen_reads: dict[int, UnseenRead] = dataclasses.field(default_factory=dict)
    part_ns: float = 0.0
    host: HostTimes = NO_HOST_TIMES


@dataclasses.dataclass
class _Step:
    backward_start: Any
    ready: dict[int, Any] = dataclasses.field(default_factory=dict)
    used: set[int] = dataclasses.field(default_factory=set)  # parameters that autograd made a gradient of
    need: dict[int, Any] = dataclasses.field(default_factory=dict)
    early: dict[int, Any] = dataclasses.field(default_factory=dict)  # the same before forward: the program's own reads
    owner_start: dict[int, Any] = dataclasses.field(default_factory=dict)  # forward of the module that owns it begins
    watched: bool = False  # the forward pass after it was watched for reads
    backward_end: Any = None
    spans: list[tuple[str, Any, Any]] = dataclasses.field(default_factory=list)  # category, start, end
    update_calls: int = 1
    next_backward: Any = None

    def first_use(self, index: int, *, is_unseen: bool) -> Any:
        """The time of the parameter's first read, or possible unseen read; None if it is not known."""
        # If forward was not seen, the early reads may be its own.
        if self.watched and index in self.early:
            return self.early[index]
        return (self.owner_start if is_unseen else self.need).get(index)

    @property
    def complete(self) -> bool:
        """False if backward failed, or if the next backward pass has not begun."""
        return self.backward_end is not None and self.next_backward is not None


class Stopwatch:
    """Takes one rank's stamps during one warm-up."""

    def __init__(self, device: torch.device, parameter_count: int) -> None:
        self._clock = clock_of(device)
        self._parameter_count = parameter_count
        self._steps: list[_Step] = []
        self._step = _Step(None)  # the open one; nothing that comes before the first one counts
        self._forward_end: Any = None
        self._resumed: Any = None  # when the program went on after that

    def forward_ended(self) -> None:
        self._forward_end = self._resumed = self._clock.stamp()

    def resumed(self) -> None:
        """Called after work of gradcast's own behind forward, which does not count."""
        self._resumed = self._clock.stamp()

    def backward_started(self) -> None:
        """Called at the first gradient. If the end of forward is known, backward counts from there."""
        if self._forward_end is None:
            self.forward_ended()
        self._step.next_backward = self._forward_end
        self._step = _Step(self._resumed)
        self._steps.append(self._step)
        self._forward_end = None

    def ready(self, index: int, *, used: bool, together_with: int | None = None) -> None:
        """``used``: autograd made the gradient; False for zeros in place of a missing one. ``together_with``: it was
        ready when that one was."""
        earlier = None if together_with is None else self._step.ready.get(together_with)
        self._step.ready[index] = self._clock.stamp() if earlier is None else earlier
        if used:
            self._step.used.add(index)

    def backward_ended(self) -> None:
        self._step.backward_end = self._clock.stamp()

    @contextlib.contextmanager
    def timed(self, category: str) -> Iterator[None]:
        """Context for work that is not compute: "wait", for gradients, and "update", the optimizer's work."""
        start = self._clock.stamp()
        yield
        self._step.spans.append((category, start, self._clock.stamp()))

    def updated_in(self, calls: int) -> None:
        self._step.update_calls = max(1, calls)

    def watching(self) -> None:
        """Called where a forward pass begins whose reads are seen."""
        self._step.watched = True

    def read(self, index: int) -> None:
        self._step.need.setdefault(index, self._clock.stamp())

    def read_early(self, index: int) -> None:
        """Called when the program reads the parameter, or something else waits for it, before the next forward pass."""
        self._step.early.setdefault(index, self._clock.stamp())

    def owner_started(self, indices: Sequence[int]) -> None:
        """Called where the forward of the module that owns these parameters begins."""
        self._step.owner_start |= dict.fromkeys(indices, self._clock.stamp())

    def unseen_reads(self) -> set[int]:
        """Parameters that forward used although no read was seen, since they have gradients. C++ extensions and views
        that the program has kept read in such ways."""
        pairs = itertools.pairwise(self._steps)
        return {index for before, step in pairs if before.watched for index in step.used - before.need.keys()}

    def pack_ns_per_byte(self, flats: Sequence[torch.Tensor]) -> float:
        """Cost of packing and unpacking a block of several ranges, measured by copying bytes out and back."""
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
        self,
        blocks: list[list[Sample]],
        pack_ns_per_byte: float,
        unseen_reads: dict[int, UnseenRead],
        host: HostTimes = NO_HOST_TIMES,
    ) -> Measurement:
        """Medians of all complete steps but the first, which allocates memory. Single disturbed steps do not count."""
        steps = [step for step in self._steps[1:] if step.complete]
        updated = [step for step in steps if any(category == "update" for category, _, _ in step.spans)]
        part_ns = cost_of_a_part((step.update_calls, self._total_ns(step, "update")) for step in updated)
        compute = [self._compute(step, part_ns) for step in self._steps[1:]]
        since_backward = [functools.partial(self._since, step, self._pause_ns(step)) for step in steps]
        ready_ns, need_ns = [], []
        for index in range(self._parameter_count):
            ready = [self._clock.between(s.backward_start, s.ready[index]) for s in steps if index in s.ready]
            ready_ns.append(max(0.0, statistics.median(ready)) if ready else 0.0)
            is_unseen = index in unseen_reads
            first_use = [step.first_use(index, is_unseen=is_unseen) for step in steps]
            need = [since(stamp) for stamp, since in zip(first_use, since_backward, strict=True) if stamp is not None]
            # A parameter that nobody reads is not urgent.
            need_ns.append(statistics.median(need) if need else 0.0 if is_unseen else float("inf"))
        return Measurement(ready_ns, need_ns, compute, blocks, pack_ns_per_byte, unseen_reads, part_ns, host)

    def _compute(self, step: _Step, part_ns: float) -> Compute | None:
        if not step.complete:
            return None
        return Compute(
            backward_ns=self._clock.between(step.backward_start, step.backward_end),
            forward_ns=self._since(step, self._pause_ns(step), step.next_backward),
            update_ns=max(0.0, self._total_ns(step, "update") - part_ns * (step.update_calls - 1)),
        )

    def _pause_ns(self, step: _Step) -> float:
        """Returns waiting and update, which are not counted in the time since backward."""
        return self._total_ns(step, "wait") + self._total_ns(step, "update")

    def _since(self, step: _Step, pause_ns: float, stamp: Any) -> float:
        return max(0.0, self._clock.between(step.backward_end, stamp) - pause_ns)

    def _total_ns(self, step: _Step, category: str) -> float:
        return sum(self._clock.between(start, end) for name, start, end in step.spans if name == category)
