"""The gradients on the network: buffers, engine, the plan in force, and waits that report what they wait for.

On a device, waiting returns as soon as the device's queue contains the end of the blocks concerned: the current stream
waits for the rest, and the host goes on, also into the next iteration. It is never more than one iteration ahead.

Thread safety: ``ready`` from any thread; everything else from the training thread, or under its owner's lock.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from gradcast import _core
from gradcast.errors import Error
from gradcast.host_traffic import WIRE_SHARES, exchange_form
from gradcast.training.options import Options
from gradcast.training.ranks.group import Group, transport_of
from gradcast.training.ranks.stall_watchdog import StallWatchdog
from gradcast.training.step.gradient_buffers import GradientBuffers

# Python checks for Ctrl-C between two slices.
_WAIT_SLICE_NS = 100_000_000


@dataclasses.dataclass
class _Seen:
    """The number of an iteration's tensors that the engine has reported as queued, and as arrived."""

    queued: int = 0
    arrived: int = 0


class GradientExchange:
    """The exchange of a session. ``buffers``: the tensors that are sent. ``profile``, ``plan``: in force. ``order``: of
    the buffers: tensor k of the profile is the gradient of parameter ``order[k]``. ``places``: by parameter, the index
    of its tensor, its buffer, and the bytes there that are written with its gradient. ``on_device``: the host would
    wait for the values of arrived gradients. ``table``: a GradientTable that hands gradients over, if there is one."""

    def __init__(self, buffers: GradientBuffers, group: Group, options: Options, table: Any = None) -> None:
        self.buffers, self._table = buffers, table
        self.on_device = any(flat.device.type != "cpu" for flat in buffers.flats)
        self.form = exchange_form(group.hosts, options.wire, on_device=self.on_device)
        self._transport = transport_of(group, buffers.flats, options.wire, options.nccl)
        self._set_groups()
        self._engine = _core.Engine(self._transport, timeline_iterations=options.watch.timeline_steps)
        self.watch = StallWatchdog(group, options, self._engine)
        self.order: tuple[int, ...] = ()
        self.places: list[tuple[int, int, int, int]] = []
        self.profile: _core.Profile | None = None
        self.plan: _core.Plan | None = None
        self._seen = _Seen()
        self._has_begun = False
        self._deadline_s: float | None = None

    def follow(self, profile: _core.Profile, plan: _core.Plan) -> None:
        """Follows the plan from the next iteration on. ``profile``: lists the tensors in the order of the buffers; the
        gradients move if that is another one. REQUIRES: as ``wait_until_idle``."""
        self.wait_until_idle()
        if profile is not self.profile:
            index_of = {name: index for index, name in enumerate(self.buffers.names)}
            order = tuple(index_of[tensor.name] for tensor in profile.tensors)
            if order != self.order:
                self.lay_out(order)
        self.profile, self.plan = profile, plan
        self._engine.follow(profile, plan)
        self._transport.expect([(each.buffer, each.ranges) for each in plan.blocks if each.op != "all_gather"])

    def lay_out(self, order: Sequence[int]) -> None:
        """Lays the gradients out anew, in new memory if the program keeps old ones. REQUIRES: as
        ``wait_until_idle``."""
        self.wait_until_idle()
        before = dict(enumerate(self.buffers.flats))
        self.buffers.lay_out(order)
        for buffer, flat in enumerate(self.buffers.flats):
            if flat is not before.get(buffer):
                self._transport.replace_buffer(buffer, flat)
        self._set_groups()
        self.order = tuple(order)
        places = enumerate(self.buffers.layout)
        by_parameter = {self.order[k]: (k, each.buffer, each.lo_bytes, each.end_bytes) for k, each in places}
        self.places = [by_parameter[index] for index in range(len(order))]
        self.views_changed()

    def move_out(self) -> None:
        """Moves gradients out of the buffers and frees their memory, until ``lay_out``. REQUIRES: as
        ``wait_until_idle``; the table has no hooks."""
        self.wait_until_idle()
        for buffer, flat in enumerate(self.buffers.flats):
            self._transport.replace_buffer(buffer, flat.new_empty(0))
        self._table.forget_layout()  # any reference of ours to a view would look like one of the program's
        self.buffers.move_out()

    def views_changed(self) -> None:
        """Makes the table follow the buffers' views."""
        if self._table is not None:
            self._table.follow_layout(self.buffers.views, self.places)

    def install_hooks(
        self, norm_type: float | None, on_gradient: Callable[[int], None], on_placed: Callable[[int], None]
    ) -> None:
        """Installs hooks that hand gradients over like ``ready``, but without Python (gradient_table.h)."""
        self._table.install(self._engine.sink, self._transport, norm_type, on_gradient, on_placed)

    def _set_groups(self) -> None:
        for buffer, residual in self.buffers.residuals.items():
            self._transport.set_groups(buffer, self.buffers.groups(buffer), residual)
        self._kept_residuals: list[tuple[int, int]] = []  # of this step: buffer and first element

    def keep_residual(self, index: int) -> None:
        """Keeps the residual of a parameter that this rank has not used, and so does not send it."""
        if self.buffers.has_groups(index) and self.buffers.views[index].numel() > 0:
            where = self.buffers.buffer_of[index], self.buffers.offsets[index]
            self._transport.send_residual(*where, sends=False)
            self._kept_residuals.append(where)

    def wait_for_turn(self) -> bool:
        """Waits until the next iteration may begin; like ``wait_until_idle``, but on a device blocks may be in its
        queue afterwards. Work that the current stream is given from now on runs behind them."""
        if not self.on_device:
            return self.wait_until_idle()
        if not self._has_begun:
            return False
        had_to = self._engine.busy
        self.wait_all()
        self._wait(lambda: self._engine.wait([], _WAIT_SLICE_NS))  # for the iteration before
        return had_to

    def begin(self) -> int:
        """Opens an iteration and returns the engine's number of it."""
        self._seen = _Seen()
        try:
            iteration = self._engine.begin()
        except Error as error:
            raise self.watch.explain(error) from None
        self._has_begun = True
        while self._kept_residuals:
            self._transport.send_residual(*self._kept_residuals.pop(), sends=True)
        return iteration

    def ready(self, index: int) -> None:
        """Hands over the gradient of this parameter, which is in its view."""
        place = self.places[index]
        if self.on_device:
            self._transport.on_written(*place[1:])
        try:
            self._engine.on_ready(place[0])
        except Error as error:
            raise self.watch.explain(error) from None

    def wait(self, indices: Sequence[int], *, with_earlier: bool = False) -> Sequence[int]:
        """Waits until the gradients of these parameters can be used: now, or on a device on the current stream.

        Returns them. ``with_earlier``: on a device also orders the stream behind those that can be used as early, and
        returns them, each once in an iteration. Raises network failures.
        """
        tensors = [self.places[index][0] for index in indices]
        self._wait(lambda: self._engine.wait(tensors, _WAIT_SLICE_NS, queued=self.on_device))
        if not self.on_device:
            return indices
        if with_earlier:
            earlier = self._engine.queued_no_later_than(tensors, self._seen.queued)
            self._seen.queued += len(earlier)
            indices = self._parameters_of({*tensors, *earlier})
        self._transport.order_behind([self.places[index][1:] for index in indices])
        return indices

    def wait_all(self) -> None:
        """``wait`` for all gradients of the iteration."""
        self._wait(lambda: self._engine.wait_all(_WAIT_SLICE_NS, queued=self.on_device))
        if self.on_device:
            self._transport.order_behind([(buffer, 0, flat.nbytes) for buffer, flat in enumerate(self.buffers.flats)])

    def wait_until_idle(self) -> bool:
        """Makes the host wait until no block is in flight. Returns whether it had to wait. Raises network failures.
        REQUIRES: all gradients exist."""
        if not self._has_begun:
            return False
        had_to = self._engine.busy
        self._wait(lambda: self._engine.wait_all(_WAIT_SLICE_NS))
        return had_to

    def newly_arrived(self) -> list[int]:
        """Parameters whose gradients have arrived since the last call in this iteration."""
        tensors = self._engine.arrivals(self._seen.arrived)
        self._seen.arrived += len(tensors)
        return self._parameters_of(tensors)

    def wire_bytes(self, plan: _core.Plan) -> int:
        """Bytes of the plan's blocks in the wire format."""
        shares = [WIRE_SHARES[self.buffers.wire] if dtype == torch.float32 else 1.0 for dtype in self.buffers.dtypes]
        return sum(round(block.size_bytes * shares[block.buffer]) for block in plan.blocks)

    @property
    def busy(self) -> bool:
        return self._engine.busy

    def timeline(self) -> tuple[_core.IterationRecord, ...]:
        return self._engine.timeline()

    def counters(self) -> _core.EngineCounters:
        return self._engine.counters()

    def shutdown(self) -> None:
        self._has_begun = False
        self.watch.close()
        self._engine.shutdown()
        self._transport = None  # it keeps the buffers

    def _parameters_of(self, tensors: Iterable[int]) -> list[int]:
        return [self.order[tensor] for tensor in tensors]

    @contextlib.contextmanager
    def waiting_at_most(self, limit_s: float | None) -> Iterator[None]:
        """Context in which waits raise Error(communication) after ``limit_s``; with None, only for network failures."""
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
