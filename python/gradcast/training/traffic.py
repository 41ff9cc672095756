"""The gradients on the network: buffers, engine and the plan in force, and waiting that says what it waits for.

Thread safety: ``ready`` from any thread; everything else from the training thread, or under its owner's lock.
"""

import logging
import time
from collections.abc import Sequence

from gradcast import _core
from gradcast.training import extension
from gradcast.training.buffers import GradientBuffers
from gradcast.training.group import Group
from gradcast.training.options import Options
from gradcast.training.planning import Agreed

_log = logging.getLogger("gradcast")
# Between two of these Python looks for Ctrl-C.
_WAIT_SLICE_NS = 100_000_000


class Traffic:
    def __init__(self, buffers: GradientBuffers, group: Group, options: Options) -> None:
        self._buffers = buffers
        self._stall_warning_ns = options.stall_warning_s * 1e9
        self._on_device = any(flat.device.type != "cpu" for flat in buffers.flats)
        self._transport = extension.load().Transport(group.own, buffers.flats)
        self._engine = _core.Engine(self._transport, timeline_iterations=options.timeline_steps)
        self.place_of: list[int] = []  # of each parameter, its tensor in the profile in force
        self.agreed: Agreed | None = None
        self.plan_version = 0
        self._seen = 0

    def follow(self, agreed: Agreed) -> None:
        """The plan of the next iteration; moves the gradients where its layout is another one."""
        if self.agreed is None or self.agreed.order != agreed.order:
            self._buffers.lay_out(agreed.order)
            self.place_of = [0] * len(agreed.order)
            for place, index in enumerate(agreed.order):
                self.place_of[index] = place
        self.agreed = agreed
        self.plan_version = self._engine.follow(agreed.profile, agreed.plan)

    def begin(self) -> int:
        """Opens an iteration; returns the engine's number of it."""
        self._seen = 0
        return self._engine.begin()

    def ready(self, index: int) -> None:
        """The gradient of this parameter is in its view."""
        place = self.place_of[index]
        if self._on_device:
            where = self._buffers.layout[place]
            self._transport.on_written(where.buffer, where.lo_bytes, where.hi_bytes)
        self._engine.on_ready(place)

    def wait(self, indices: Sequence[int]) -> int:
        """Waits until these have arrived. Returns how long it waited, ns; raises what failed on the network."""
        return self._wait([self.place_of[index] for index in indices])

    def wait_all(self) -> int:
        return self._wait(None)

    def newly_arrived(self) -> list[int]:
        """Parameters that have arrived since the last call in this iteration."""
        places = self._engine.arrivals(self._seen)
        self._seen += len(places)
        order = self.agreed.order
        return [order[place] for place in places]

    @property
    def busy(self) -> bool:
        return self._engine.busy

    def timeline(self) -> tuple:
        return self._engine.timeline()

    def counters(self):
        return self._engine.counters()

    def shutdown(self) -> None:
        self._engine.shutdown()

    def _wait(self, places: list[int] | None) -> int:
        start_ns = time.perf_counter_ns()
        warn_ns = start_ns + self._stall_warning_ns
        while True:
            done = (
                self._engine.wait_all(_WAIT_SLICE_NS) if places is None else self._engine.wait(places, _WAIT_SLICE_NS)
            )
            now_ns = time.perf_counter_ns()
            if done:
                return now_ns - start_ns
            if now_ns > warn_ns:
                _log.warning("waiting for %.0f s: %s", (now_ns - start_ns) / 1e9, self._engine.waiting_for())
                warn_ns = now_ns + self._stall_warning_ns
