"""Rounds of local steps: fragments are taken, sent and applied at the steps of the schedule.

One iteration of the engine carries every fragment once, in the order in which they are taken. So the engine starts a
fragment as soon as it is written and the one before it is on its way, and the network decides nothing but how long
``after_step`` waits.

Thread safety: training thread.
"""

import collections
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from gradcast import _core
from gradcast.errors import Error, refused
from gradcast.local_pace import FIRST
from gradcast.local_steps import Schedule
from gradcast.training.local import header
from gradcast.training.local.fragments import Fragments
from gradcast.training.local.outer import MERGE, OuterOptimizer, with_defaults
from gradcast.training.local.pacing import Pacing
from gradcast.training.options import Options
from gradcast.training.plan.measured_profile import layout_profile
from gradcast.training.ranks.group import Group
from gradcast.training.step.gradient_exchange import GradientExchange


class FragmentExchange:
    """The fragments on the network. ``left``: those that the open iteration has not begun to send, in order.
    ``plan``: of the open iteration."""

    def __init__(self, fragments: Fragments, group: Group, options: Options) -> None:
        self._fragments, self._buffers = fragments, fragments.buffers
        self.exchange = GradientExchange(self._buffers, group, options)
        order = range(len(self._buffers.names))
        self._profile = layout_profile(self._buffers, order, world_size=group.world_size, name="local steps")
        self.left: collections.deque[int] = collections.deque()
        self._first = -1
        self._follow(0)
        group.connect(self._buffers.messages(self.plan.blocks))
        fragments.hold_views()
        device = fragments.header(0).device
        self._reading = torch.cuda.Stream(device) if device.type == "cuda" else None

    def _follow(self, first: int) -> None:
        """Makes the engine send fragments in their order from the next iteration on, beginning with this one."""
        if self._first == first:
            return
        count = len(self._fragments.indices)
        rotated = [(first + position) % count for position in range(count)]
        blocks = [block for fragment in rotated for block in self._blocks(fragment)]
        self._first, self.plan = first, _core.Plan(blocks=blocks, policy="local steps", mode="overlap")
        self.exchange.follow(self._profile, self.plan)

    def _blocks(self, fragment: int) -> list[_core.Block]:
        """One for each buffer, in which the fragment's tensors follow one another."""
        ranges: dict[int, tuple[int, int]] = {}
        for index in self._fragments.indices[fragment]:
            where = self._buffers.layout[index]
            lo, _ = ranges.get(where.buffer, (where.lo_bytes, 0))
            ranges[where.buffer] = (lo, where.end_bytes)
        reason = f"fragment {fragment}"
        return [_core.Block(ranges=[each], buffer=buffer, reason=reason) for buffer, each in ranges.items()]

    def begin(self, first: int) -> None:
        """Opens an iteration. REQUIRES: all fragments of the last one have arrived."""
        self.exchange.wait_until_idle()  # for the engine's own record of the last block
        self._follow(first)
        self.exchange.begin()
        count = len(self._fragments.indices)
        self.left = collections.deque((first + position) % count for position in range(count))

    def send(self, fragment: int) -> None:
        """Lets the engine send the fragment, which is written."""
        assert self.left[0] == fragment, "fragments are sent in their order"
        self.left.popleft()
        for index in self._fragments.indices[fragment]:
            self.exchange.ready(index)

    def wait(self, fragment: int) -> None:
        """Waits for the fragment, and raises if the ranks disagree. On a device the host waits until it has arrived,
        and not for what the current stream has been given since."""
        indices, here = self._fragments.indices[fragment], self._fragments.header(fragment)
        with torch.cuda.stream(self._reading):
            self.exchange.wait(indices)
            header.check(here, fragment)
        if self._reading is not None:
            self.exchange.wait(indices)


class Rounds:
    """``clock``: steps since the beginning, or since ``end``; the schedule counts them. ``steps``: all. ``count``: how
    often all fragments have been taken. ``waited_ns``: in all steps until now. ``pacing``: None unless it chooses H, at
    most ``longest.every``, where a round has ended and nothing is in flight."""

    def __init__(
        self,
        fragments: Fragments,
        longest: Schedule,
        network: FragmentExchange | None,
        group: Group,
        pacing: Pacing | None,
        options: Options,
    ) -> None:
        self._fragments, self._longest, self._network, self._group = fragments, longest, network, group
        self.pacing, self._wire, self._local = pacing, options.wire, options.local
        self.local_share = (MERGE if options.local.merge is None else options.local.merge) if longest.overlap else 0.0
        self.schedule = longest if pacing is None else longest.at(min(FIRST, longest.every), options.local.overlap)
        self.clock = self.steps = self.count = 0
        self.waited_ns = 0
        # Fragments that were taken and are not applied, in order, and whether they have arrived and were checked.
        self._taken: dict[int, bool] = {}
        self._failure: Error | None = None

    @property
    def in_flight(self) -> list[int]:
        return list(self._taken)

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    @property
    def has_open_iteration(self) -> bool:
        """Returns whether the engine waits for fragments that are not taken yet."""
        return self._network is not None and bool(self._network.left)

    def after_step(self) -> None:
        self.steps += 1
        self.clock += 1
        with self._failing():
            for fragment in self.schedule.applied(self.clock):
                self._apply(fragment, self.local_share)
            every, pacing = self.schedule.every, self.pacing
            if pacing is not None and self.clock % every == 0 and pacing.is_due(every, self.steps):
                self._measure(pacing)
                return
            taken = self.schedule.taken(self.clock)
            for fragment in taken:
                self.take(fragment)
            self.count += bool(taken) and taken[-1] == len(self.schedule.fragments) - 1
            if self.schedule.overlap == 0 and taken:
                self._apply_all(0.0)
                self.clock = 0  # the next round begins as the first one does

    def end(self) -> None:
        """Ends the round: afterwards the parameters of all ranks are the global copy. Collective."""
        if self.clock == 0:
            return  # nothing is left of a round; another one would move the copy by its momentum alone
        with self._failing():
            self._close(ending=True)

    def _measure(self, pacing: Pacing) -> None:
        """Ends the round and chooses the steps of those that follow."""
        own = pacing.score()
        self._close(ending=False)
        common, network = pacing.score(), self._network
        what = f"what options.local.evaluate returned after {self.steps} steps"
        with contextlib.nullcontext() if network is None else network.exchange.watch.waiting(what):
            everyone = self._group.gather((own, common), beside_blocks=True)
        every = pacing.choose(self.schedule.every, self.steps, everyone)
        # The momentum is the movement of a round, which is as many times as long.
        self._fragments.scale_momentum(every / self.schedule.every)
        self.schedule = self._longest.at(every, self._local.overlap)

    def _close(self, *, ending: bool) -> None:
        self._apply_all(self.local_share)
        # First those that the open iteration still has to send, and then the others, which have drifted since.
        left = list(self._network.left) if self._network is not None else []
        for fragment in left:
            self.take(fragment, ending=ending)
        self._apply_all(0.0)
        everything = range(len(self.schedule.fragments))
        if len(left) < len(everything):
            for fragment in everything:  # an iteration carries all
                self.take(fragment, ending=ending)
            for fragment in everything:
                self._apply(fragment, 0.0, drops=fragment in left)
        self.count += 1
        self.clock = 0

    def await_taken(self) -> None:
        """Waits until what was taken has arrived."""
        with self._failing():
            for fragment in self._taken:
                self._receive(fragment)

    def take(self, fragment: int, *, ending: bool = False) -> None:
        network = self._network
        if network is not None and not network.left:
            for each in self._taken:
                self._receive(each)
            network.begin(fragment)
        self._fragments.write(fragment)
        self._taken[fragment] = network is None
        if network is not None:
            checksum = self._fragments.checksum(fragment)
            here = self._fragments.header(fragment)
            header.write(here, self._group.rank, step=self.steps, ending=ending, checksum=checksum)
            network.send(fragment)

    def _apply(self, fragment: int, local_share: float, *, drops: bool = False) -> None:
        self._receive(fragment)
        del self._taken[fragment]
        if not drops:
            self._fragments.update(fragment, local_share)

    def _receive(self, fragment: int) -> None:
        """Waits for it, unless it has arrived, and raises if the ranks disagree."""
        if self._network is None or self._taken[fragment]:
            return
        start_ns = time.perf_counter_ns()
        self._network.wait(fragment)
        self.waited_ns += time.perf_counter_ns() - start_ns
        self._taken[fragment] = True

    def _apply_all(self, local_share: float) -> None:
        for fragment in list(self._taken):
            self._apply(fragment, local_share)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Makes each later step raise an error again, since the ranks' models may differ after it."""
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except Error as error:
            self._failure = error
            if error.code == "communication" and self._network is not None:
                self._failure = Error(
                    f"{error}. This rank is after {self.steps} optimizer steps of its own; ranks whose loops have "
                    "different lengths leave others waiting like this",
                    error.code,
                )
            raise self._failure from None
        except BaseException as error:
            self._failure = refused(
                f"a step was interrupted while parameters were averaged ({type(error).__name__}), so this rank may "
                "lack a part of it; go on from the last checkpoint"
            )
            raise

    # --- Checkpoints ---

    def state(self, kept: dict[str, Any] | None = None) -> dict[str, Any]:
        """``kept``: see Fragments.by_name; then the entries of the module's state dict are omitted."""
        self.await_taken()
        fragments = self._fragments
        in_flight = {k: [each.difference.clone() for each in fragments.pieces[k]] for k in self._taken}
        place = {"clock": self.clock, "steps": self.steps, "rounds": self.count, "in_flight": in_flight}
        if self.pacing is not None:
            place["pacing"] = self.pacing.state() | {"every": self.schedule.every}
        names = ("values", "momentum", "local")
        tensors = {k: fragments.by_name(k, None if kept is None else kept.setdefault(k, {})) for k in names}
        return {"settings": self._settings(), "place": place, "tensors": tensors}

    def _settings(self) -> dict[str, Any]:
        own: dict[str, Any] = {"every": self._local.every, "every_max": self._local.every_max, "wire": self._wire}
        own |= {"overlap": self._longest.overlap, "local_share": self.local_share, "world_size": self._group.world_size}
        return own | OuterOptimizer.of(self._local).settings() | {"cuts": self._fragments.identity()}

    def refusal_of(self, state: dict[str, Any]) -> str | None:
        """Returns the reason why training cannot go on from this state."""
        tensors = state["tensors"]
        reason = self._fragments.refusal_of(tensors["values"])
        if reason is not None:
            return f"it is of another model: {reason}"
        own = self._settings()
        saved = with_defaults(state["settings"])
        differing = next((key for key in own if own[key] != saved.get(key)), None)
        if state["place"]["clock"] > 0 and differing is not None:
            return (
                f"it was saved inside a round with {differing} {saved.get(differing)}, and here it is "
                f"{own[differing]}; keep the settings, or save after handle.end_round()"
            )
        if bool(tensors["momentum"]) != bool(self._fragments.by_name("momentum")):
            return "one of them has an outer momentum, and the other has none; keep options.local.outer"
        return None

    def restore(self, state: dict[str, Any]) -> None:
        """REQUIRES: ``refusal_of`` is None, and nothing was sent."""
        for what, tensors in state["tensors"].items():
            self._fragments.restore(what, tensors)
        place = state["place"]
        self.clock, self.steps, self.count = place["clock"], place["steps"], place["rounds"]
        if self.pacing is not None and "pacing" in place:
            self.pacing.restore(place["pacing"])
            every = min(place["pacing"]["every"], self._longest.every)
            self._fragments.scale_momentum(every / place["pacing"]["every"])  # as in _measure
            self.schedule = self._longest.at(every, self._local.overlap)
        if self.schedule.overlap == 0 and self.clock % self.schedule.every == 0:
            self.clock = 0  # older states count on where a round ends
        self._taken = {}
        for fragment, differences in place["in_flight"].items():
            for piece, saved in zip(self._fragments.pieces[fragment], differences, strict=True):
                piece.difference.copy_(saved)
            self._taken[fragment] = True

    def fingerprint(self) -> tuple[int, ...]:
        """Numbers that are equal on ranks whose rounds can go on together."""
        sums = [int(self._fragments.checksum(fragment)) for fragment in range(len(self.schedule.fragments))]
        return (self.schedule.every, self.clock, self.steps, *self._taken, *sums)
