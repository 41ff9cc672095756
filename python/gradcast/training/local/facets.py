"""Statistics, saved state and global copy of a session of local steps."""

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

from gradcast import _core
from gradcast.errors import Error, refused
from gradcast.training.local.fragments import Fragments
from gradcast.training.local.outer import OuterOptimizer
from gradcast.training.local.rounds import FragmentExchange, Rounds
from gradcast.training.ranks.group import Group
from gradcast.training.sessions import facets
from gradcast.training.sessions.open_blocks import Progress
from gradcast.training.step import residuals

_log = logging.getLogger("gradcast")
STATE_VERSION = 1


class LocalReport(facets.Report):
    def __init__(
        self, rounds: Rounds, fragments: Fragments, network: FragmentExchange | None, outer: OuterOptimizer, wire: str
    ) -> None:
        self.rounds, self.fragments, self.network, self._outer, self._wire = rounds, fragments, network, outer, wire
        self.step_ends: list[tuple[int, int]] = []  # of this round and the last: time, and what was waited until then

    def step_ended(self) -> None:
        self.step_ends.append((time.perf_counter_ns(), self.rounds.waited_ns))
        del self.step_ends[: -self.rounds.schedule.every - 1]

    @property
    def is_sending(self) -> bool:
        return self.network is not None and self.network.exchange.busy

    @property
    def plan(self) -> _core.Plan | None:
        return None if self.network is None else self.network.plan

    def plan_text(self, profile_path: str | None) -> str:
        raise refused("local steps follow no measured plan; their schedule follows from the model and the options")

    def stats(self) -> dict[str, Any]:
        schedule, ends = self.rounds.schedule, self.step_ends
        count = max(1, len(ends) - 1)
        own = {
            "sync_every": schedule.every,
            "pace": None if self.rounds.pacing is None else self.rounds.pacing.last,
            "outer": "average" if self._outer.momentum is None else "nesterov",
            "outer_overlap": schedule.overlap,
            "outer_merge": self.rounds.local_share if schedule.overlap else 0.0,
            "fragments": len(schedule.fragments),
            "in_flight": self.rounds.in_flight,
            "rounds": self.rounds.count,
            "steps_in_round": self.rounds.clock % schedule.every,
            "bytes_per_round": self.fragments.sent_bytes if self.network is not None else 0,
            "state_bytes": sum(self.fragments.state_bytes.values()),
        }
        values: dict[str, Any] = {"local_steps": own, "wire": self._wire}
        if len(ends) > 1:
            values["measured_ms"] = (ends[-1][0] - ends[0][0]) / count / 1e6
            values["exposed_ms"] = (ends[-1][1] - ends[0][1]) / count / 1e6
        if self.network is not None:
            values["bytes"] = sum(block.size_bytes for block in self.network.plan.blocks)
            values["wire_bytes"] = self.network.exchange.wire_bytes(self.network.plan)
            values["blocks"] = len(self.network.plan.blocks)
        return values


class GlobalCopy(facets.RoundCalls):
    """The program's calls that end a round, and that show the global copy."""

    def __init__(self, report: LocalReport, progress: Progress) -> None:
        self._report, self._fragments, self._progress = report, report.fragments, progress

    def end_round(self) -> None:
        self.require_own()
        self._progress.fence.refuse("handle.end_round()")
        self._report.rounds.end()
        self._report.step_ends.clear()

    @contextlib.contextmanager
    def global_model(self) -> Iterator[None]:
        self.require_own()
        own = self._fragments.by_name("local")
        self.lends = True
        self._fragments.restore("local", self._fragments.by_name("values"))
        try:
            yield
        finally:
            self.lends = False
            self._fragments.restore("local", own)

    def require_own(self) -> None:
        """Raises Error(invalid_use) while the module has other tensors than this rank's own."""
        if self.lends:
            raise refused("inside handle.global_model() the module has the global copy; leave it first")


class LocalCheckpoint(facets.Checkpoint):
    def __init__(self, report: LocalReport, copy: GlobalCopy, group: Group, progress: Progress) -> None:
        self._rounds, self._fragments, self._network = report.rounds, report.fragments, report.network
        self._copy, self._group, self._progress = copy, group, progress

    def state_dict(self) -> dict[str, Any]:
        """This rank's state. Sends nothing, and waits for the fragments in flight."""
        return self.saved(None)

    def saved(self, kept: dict[str, Any] | None) -> dict[str, Any]:
        """``kept``: for a snapshot, the memory of its tensors, which this fills, but for what the module's state dict
        has."""
        self._copy.require_own()
        state = self._rounds.state(kept)
        own = {"version": STATE_VERSION, "mode": "local", "rank": self._group.rank}
        left = {} if self._fragments.buffers is None else residuals.saved(self._fragments.buffers, self._group)
        return own | state | left

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._copy.require_own()
        what = "handle.load_state_dict()"
        network = self._network
        with contextlib.nullcontext() if network is None else network.exchange.watch.waiting(f"{what} on every rank"):
            everyone = self._group.computed_by_each(lambda: self._restored(state), what)
        if any(fingerprint != everyone[0] for fingerprint in everyone):
            raise refused(
                "the ranks have loaded states of different steps; let each load the state that it has saved after the "
                "same step"
            )
        self._progress.steps = self._rounds.steps

    def _restored(self, state: dict[str, Any]) -> tuple[int, ...]:
        """Loads the state, and returns what has to be equal on all ranks then."""
        try:
            self.check(state)
            self._rounds.restore(state)
            if self._fragments.buffers is not None:
                self._restore_residuals(state)
        except (KeyError, TypeError) as error:
            raise refused(
                f"the state is not whole ({type(error).__name__}: {error}); load what handle.state_dict() returned"
            ) from None
        return self._rounds.fingerprint()

    def _restore_residuals(self, state: dict[str, Any]) -> None:
        try:
            dropped = residuals.restore(self._fragments.buffers, self._group, state)
        except Error as error:
            if state["place"]["clock"] > 0:
                raise
            dropped = str(error)  # between rounds other settings, which cut other fragments, are fine
        if dropped is not None:
            _log.warning("the residuals of earlier differences are dropped on rank %d: %s", self._group.rank, dropped)

    def check(self, state: dict[str, Any]) -> None:
        if state.get("mode") != "local" or state.get("version") != STATE_VERSION:
            raise refused("the state is not one of local steps of this version; load what handle.state_dict() returned")
        if self._rounds.steps > 0:
            raise refused("load the state right after attach, before the first step")
        reason = self._rounds.refusal_of(state)
        if reason is None and state["place"]["clock"] > 0 and state["rank"] != self._group.rank:
            reason = f"it is that of rank {state['rank']}, and this is rank {self._group.rank}"
        if reason is not None:
            raise refused(f"training cannot go on from this state: {reason}")
