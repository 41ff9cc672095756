"""The gradients on the network: buffers, engine and the plan in force, and waiting that says what it waits for.

On a device the host waits only until the end of what is asked for is in the device's queue: the current stream waits
for the rest, and the host goes on. Only where an iteration begins has everything to have arrived.

Thread safety: ``ready`` from any thread; everything else from the training thread, or under its owner's lock.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from gradcast import _core
from gradcast.errors import Error
from gradcast.training.compat import extension
from gradcast.training.measure.step_trace import tensor_names
from gradcast.training.options import WIRES, Options
from gradcast.training.ranks.group import Group
from gradcast.training.ranks.stall_watchdog import StallWatchdog
from gradcast.training.step.active_plan import ActivePlan
from gradcast.training.step.gradient_buffers import GradientBuffers

# Between two of these Python looks for Ctrl-C.
_WAIT_SLICE_NS = 100_000_000
_NAMES_SHOWN = 3


class GradientExchange:
    def __init__(self, buffers: GradientBuffers, group: Group, options: Options) -> None:
        self._buffers = buffers
        self._group = group
        self._on_device = any(flat.device.type != "cpu" for flat in buffers.flats)
        self._transport = extension.load().Transport(group.own, buffers.flats, options.wire)
        self.wire = options.wire
        self._engine = _core.Engine(self._transport, timeline_iterations=options.timeline_steps)
        self.watch = StallWatchdog(group, options, self._engine)
        self.place_of: list[int] = []  # of each parameter, its tensor in the profile in force
        self.active: ActivePlan | None = None
        self._seen = 0
        self._has_begun = False
        self._deadline_s: float | None = None

    def follow(self, active: ActivePlan) -> None:
        """The plan of the next iteration; moves the gradients where its layout is another one."""
        if self.active is None or self.active.order != active.order:
            self.lay_out(active.order)
        self.active = active
        self._engine.follow(active.profile, active.plan)

    def lay_out(self, order: Sequence[int]) -> None:
        """Gives the gradients new places, in new memory where somebody keeps old ones. REQUIRES: nothing travels."""
        before = list(self._buffers.flats)
        self._buffers.lay_out(order)
        for buffer, (old, new) in enumerate(zip(before, self._buffers.flats, strict=True)):
            if new is not old:
                self._transport.replace_buffer(buffer, new)
        self.place_of = [0] * len(order)
        for place, index in enumerate(order):
            self.place_of[index] = place

    def begin(self) -> int:
        """Opens an iteration; returns the engine's number of it."""
        self._seen = 0
        try:
            iteration = self._engine.begin()
        except Error as error:
            raise self.watch.explain(error) from None
        self._has_begun = True
        return iteration

    def marked(self) -> None:
        """Marks were written all over the buffers, on a device perhaps on another stream than a gradient will be."""
        if self._on_device:
            for buffer, flat in enumerate(self._buffers.flats):
                self._transport.on_written(buffer, 0, flat.nbytes)

    def ready(self, index: int) -> None:
        """The gradient of this parameter is in its view."""
        place = self.place_of[index]
        if self._on_device:
            where = self._buffers.layout[place]
            self._transport.on_written(where.buffer, where.lo_bytes, where.end_bytes)
        try:
            self._engine.on_ready(place)
        except Error as error:
            raise self.watch.explain(error) from None

    def wait(self, indices: Sequence[int]) -> Sequence[int]:
        """Whoever uses these from now on, on a device on the current stream, finds that they have arrived. Returns them
        with those that come along on a device. Raises what failed on the network."""
        places = [self.place_of[index] for index in indices]
        self._wait(lambda: self._engine.wait(places, _WAIT_SLICE_NS, queued=self._on_device))
        if not self._on_device:
            return indices
        there = {*places, *self._engine.coming_with(places)}
        for place in there:
            where = self._buffers.layout[place]
            self._transport.order_behind(where.buffer, where.lo_bytes, where.end_bytes)
        return self._parameters_at(there)

    def wait_all(self) -> None:
        self._wait(lambda: self._engine.wait_all(_WAIT_SLICE_NS, queued=self._on_device))
        if self._on_device:
            for buffer, flat in enumerate(self._buffers.flats):
                self._transport.order_behind(buffer, 0, flat.nbytes)

    def settle(self) -> bool:
        """The host waits until nothing travels any more. Returns whether it had to. Raises what failed on the network
        since. REQUIRES: all gradients exist."""
        if not self._on_device or not self._has_begun:
            return False
        had_to = self._engine.busy
        self._wait(lambda: self._engine.wait_all(_WAIT_SLICE_NS))
        return had_to

    def compare_ranks(self, iteration: int) -> None:
        """Raises, on every rank, where the ranks have received different sums. Collective.

        REQUIRES: everything has arrived, and nobody has written into the gradients since.
        """
        sums = [self._checksum(block) for block in self.active.plan.blocks]
        with self.watch.waiting("comparing what the ranks have received"):
            everyone = self._group.gather(sums)
        for rank, theirs in enumerate(everyone):
            for number, (one, other) in enumerate(zip(everyone[0], theirs, strict=True)):
                if one != other:
                    names = tensor_names(self.active.profile, self.active.plan.blocks[number])
                    raise Error(
                        f"in iteration {iteration} rank 0 and rank {rank} have received different sums in block "
                        f"{number} ({', '.join(names[:_NAMES_SHOWN])}{', ...' if len(names) > _NAMES_SHOWN else ''}): "
                        "the network or a library has damaged them; the parameters of these ranks are about to differ",
                        "communication",
                    )

    def _checksum(self, block: _core.Block) -> int:
        """Of the bytes, whatever their order says; modulo 2^64."""
        flat = self._buffers.flats[block.buffer].view(torch.uint8)
        total = 0
        for lo, hi in block.ranges:
            whole = lo + (hi - lo) // 8 * 8
            # A sum of the words alone would not see two that have changed places.
            words = flat[lo:whole].clone().view(torch.int64)
            weights = torch.arange(1, words.numel() + 1, device=words.device)
            total += int((words * weights).sum()) + int(flat[whole:hi].sum())
        return total % (1 << 64)

    def newly_arrived(self) -> list[int]:
        """Parameters that have arrived since the last call in this iteration."""
        places = self._engine.arrivals(self._seen)
        self._seen += len(places)
        return self._parameters_at(places)

    def wire_bytes(self, plan: _core.Plan) -> int:
        """What the plan's blocks are as they travel."""
        singles = [dtype == torch.float32 for dtype in self._buffers.dtypes]
        return sum(
            block.size_bytes * WIRES[self.wire] // WIRES["fp32"] if singles[block.buffer] else block.size_bytes
            for block in plan.blocks
        )

    @property
    def busy(self) -> bool:
        return self._engine.busy

    def timeline(self) -> tuple:
        return self._engine.timeline()

    def counters(self):
        return self._engine.counters()

    def shutdown(self) -> None:
        self._has_begun = False
        self.watch.close()
        self._engine.shutdown()

    def _parameters_at(self, places: Collection[int]) -> list[int]:
        order = self.active.order
        return [order[place] for place in places]

    @contextlib.contextmanager
    def waiting_at_most(self, limit_s: float | None) -> Iterator[None]:
        """In here waiting raises Error(communication) after so long. None: only what fails on the network raises."""
        self._deadline_s = None if limit_s is None else time.monotonic() + limit_s
        try:
            yield
        finally:
            self._deadline_s = None

    def _wait(self, wait_slice: Callable[[], bool]) -> None:
        with self.watch.waiting():
            while not wait_slice():
                if self._deadline_s is not None and time.monotonic() > self._deadline_s:
                    raise Error(f"waited too long: {self._engine.waiting_for()}", "communication")
