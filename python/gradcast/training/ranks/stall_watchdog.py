"""Reports of the ranks that a stalled or failed step waits for.

Ranks that wait report what they wait for to rank 0's status server. That needs no help from a rank that hangs or has
ended: the ranks that have not reported are those that the others wait for. The lowest rank that has reported logs for
all, so that one message appears and not one per rank.

Thread safety: the training thread, and one thread that checks from time to time how long it has been waiting.
"""

import contextlib
import dataclasses
import json
import logging
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from gradcast import _core
from gradcast.errors import Error
from gradcast.training.options import Options
from gradcast.training.ranks.dropped import EngineUse
from gradcast.training.ranks.group import Group
from gradcast.training.ranks.status_server import StatusServer, ask, entry_of, start_status_server

_log = logging.getLogger("gradcast")
# How long a rank waits for the others' reports.
_LISTEN_S = 1.5
_POLL_S = 0.1
_TIMEOUT_SHARE = 0.25
_CHECKS = 4  # before a wait counts as a stall
_RECORDS_DUMPED = 2
_BLOCKS_DUMPED = 64
_OUTSIDE = "DDP, which reduces the gradients by itself here"
_CHARACTERS_REPORTED = 2000  # of each sentence in a report, whose size the status server limits


class StallWatchdog:
    """The watchdog of one rank. ``explains``: failures; not if the program goes on without the ranks that are gone, and
    the others notice only when this one closes its connections. ``outside``: returns where the training thread is
    inside code of others that waits for ranks, None elsewhere; called on the watchdog's thread. The same place for long
    is a wait."""

    explains = True
    outside: Callable[[], Any] | None = None

    def __init__(self, group: Group, options: Options, engine: _core.Engine) -> None:
        self._group = group
        self._engine = engine
        limit_s = options.watch.stall_warning_s
        self._warn_after_s = limit_s if group.timeout_s is None else min(limit_s, _TIMEOUT_SHARE * group.timeout_s)
        self._folder = options.watch.dump_dir or tempfile.gettempdir()
        server, self.address = start_status_server(group)
        self._failure: Error | None = None
        self._waiting: _Wait | None = None
        self._outside: _Wait | None = None  # the last one without a context
        self._use = EngineUse(engine, group)
        # A strong reference would keep this object, and so the session, alive.
        arguments = (weakref.ref(self), self._use, server)
        self._use.thread = threading.Thread(target=_watch, args=arguments, name="gradcast-watchdog", daemon=True)
        self._use.thread.start()
        self._use.begin(self)

    @contextlib.contextmanager
    def waiting(self, what: str | None = None) -> Iterator[None]:
        """Context for everything that waits for other ranks.

        ``what``: the object of the wait, for a log line; None for the engine's. Errors of the network that
        leave the block say what the other ranks report.
        """
        before, waiting = self._waiting, _Wait(what)
        self._waiting = waiting
        try:
            yield
        except Error as error:
            explained = self.explain(error)
            if explained is error:
                raise
            raise explained from None
        finally:
            self._waiting = before
            self._withdraw(waiting)

    def close(self) -> None:
        """Idempotent."""
        self._use.close()
        if self._use.thread is not threading.current_thread():
            self._use.thread.join()  # takes at most as long as it listens to the others

    def check(self) -> float:
        """Reports a wait that has become long, once. Returns in how many seconds to check again."""
        self._look_outside()
        waiting = self._waiting or self._outside
        if waiting is not None and not waiting.is_reported:
            left_s = waiting.since_s + self._warn_after_s - time.monotonic()
            if left_s > 0:
                return min(left_s, self._warn_after_s / _CHECKS)
            self._report_stall(waiting)
        return self._warn_after_s / _CHECKS

    def _look_outside(self) -> None:
        place = None if self.outside is None else self.outside()
        if self._outside is not None and self._outside.place != place:
            self._withdraw(self._outside)
            self._outside = None
        if self._outside is None and place is not None:
            self._outside = _Wait(_OUTSIDE, place)

    def _goes_on(self, waiting: "_Wait") -> bool:
        if waiting is self._outside:
            self._look_outside()
        return waiting in (self._waiting, self._outside)

    def _withdraw(self, waiting: "_Wait") -> None:
        if waiting.is_reported and self.address is not None:
            ask(self.address, "stall", self._group.rank, None)

    def _report_stall(self, waiting: "_Wait") -> None:
        text = waiting.what or self._engine.waiting_for()
        waited_s = time.monotonic() - waiting.since_s
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - waited_s))
        waiting.is_reported = True
        reports = self._exchange("stall", self._engine.counters().iterations, during=waiting)
        if not self._goes_on(waiting):
            self._withdraw(waiting)
            return
        if reports is not None and min(reports) != self._group.rank:
            return
        ranks = self._unknown("wait") if reports is None else self._describe_ranks(reports)
        name = self._group.logged_name
        _log.warning("%swaiting for %.0f s, since %s: %s. %s", name, waited_s, since, text, ranks)

    def explain(self, error: Error) -> Error:
        """An error of the network together with what the other ranks report. Other errors are returned as they are.

        The last events of all ranks go to a file. The result is the same each time.
        """
        if error.code != "communication" or error.on_all_ranks or not self.explains:
            return error
        if self._failure is None:
            entry: dict[str, Any] = {
                "iteration": self._engine.counters().iterations,
                "error": str(error)[:_CHARACTERS_REPORTED],
                "waiting_for": self._engine.waiting_for()[:_CHARACTERS_REPORTED],
                "iterations": self._records(),
            }
            reports = self._exchange("failure", entry["iteration"], entry)
            self._failure = Error(f"{error}. {self._describe_failure(reports, entry)}", error.code)
        return self._failure

    def _describe_failure(self, reports: dict[int, int] | None, own: dict[str, Any]) -> str:
        if reports is None:
            text = self._unknown("failed")
            reports = {self._group.rank: own["iteration"]}
        else:
            text = self._describe_ranks(reports, "failed")
        if min(reports) != self._group.rank:
            return text
        try:
            ranks = self._group.names_of(sorted(reports))
            return f"{text} The last events of {ranks} are in {self._dump(reports, own)}"
        except OSError as error:
            return f"{text} (Their last events could not be written: {error})"

    def _unknown(self, doing: str) -> str:
        if self.address is None:
            return f"This rank has never reached rank 0's status server, so it does not know which other ranks {doing}."
        first = self._group.names_of([0]).capitalize()
        return f"{first}, which knows the other ranks that {doing}, does not respond: it has ended, or is cut off."

    def _dump(self, reports: dict[int, int], own: dict[str, Any]) -> str:
        silent = [rank for rank in range(self._group.world_size) if rank not in reports]
        events = {"world_size": self._group.world_size, "silent": silent, "ranks": self._entries(reports, own)}
        handle, path = tempfile.mkstemp(prefix="gradcast-failure-", suffix=".json", dir=self._folder)
        with os.fdopen(handle, "w") as file:
            json.dump(events, file, indent=1)
        return path

    def _entries(self, reports: dict[int, int], own: dict[str, Any]) -> dict[int, Any]:
        """Returns the entries of the ranks that have reported; of those that cannot be fetched only the iteration."""
        entries: dict[int, Any] = {rank: {"iteration": iteration} for rank, iteration in reports.items()}
        address = self.address
        for rank in reports:
            entry = own if rank == self._group.rank or address is None else entry_of(address, rank)
            if entry is None:
                break  # the server has ended
            entries[rank] = entry
        return entries

    def _describe_ranks(self, reports: dict[int, int], doing: str = "waiting") -> str:
        """Returns sentences about the ranks that have reported and those that have not."""
        silent = [rank for rank in range(self._group.world_size) if rank not in reports]
        names_of = self._group.names_of
        text = f"{doing.capitalize()}: {names_of(sorted(reports))}"
        own = reports[self._group.rank]
        for rank, iteration in reports.items():
            if iteration != own:
                text += f", {names_of([rank])} in another step ({iteration} against {own})"
        if not silent:
            return f"{text}."
        has = "has" if len(silent) == 1 else "have"
        return f"{text}; {names_of(silent)} {has} not responded: stopped, slow, ended, or elsewhere in the program."

    def _exchange(
        self, kind: str, iteration: int, entry: dict[str, Any] | None = None, *, during: "_Wait | None" = None
    ) -> dict[int, int] | None:
        """Reports this rank's iteration, with an entry, and collects the others' iterations for a while. Returns all by
        rank, or None if the server does not answer. ``during``: ends early when this wait is over."""
        deadline_s = time.monotonic() + _LISTEN_S
        reports = None
        while self.address is not None:
            answer = ask(self.address, kind, self._group.rank, iteration, None if reports else entry)
            if answer is None:
                break  # rank 0 has ended, perhaps since it has answered
            reports = answer
            is_over = during is not None and not self._goes_on(during)
            if is_over or len(reports) == self._group.world_size or time.monotonic() > deadline_s:
                break
            time.sleep(_POLL_S)
        return reports

    def _records(self) -> list[dict[str, Any]]:
        """The last iterations: when each block was ready, started and finished, in ms before now."""
        now_ns = time.perf_counter_ns()

        def before_ms(time_ns: int) -> float | None:
            return round((now_ns - time_ns) / 1e6, 3) if time_ns else None

        return [
            {
                "iteration": record.iteration,
                "plan_version": record.plan_version,
                "gradients_ready": sum(1 for ready in record.ready_ns if ready),
                "gradients": len(record.ready_ns),
                "blocks_ms_ago": [
                    [before_ms(block.ready_ns), before_ms(block.launch_ns), before_ms(block.finish_ns)]
                    for block in record.blocks[:_BLOCKS_DUMPED]
                ],
            }
            for record in self._engine.timeline()[-_RECORDS_DUMPED:]
        ]


@dataclasses.dataclass(eq=False)
class _Wait:
    what: str | None
    place: Any = None
    since_s: float = dataclasses.field(default_factory=time.monotonic)
    is_reported: bool = False


def _watch(watchdog: "weakref.ref[StallWatchdog]", use: EngineUse, server: StatusServer | None) -> None:
    """The watchdog's thread. It does not keep the watchdog alive."""
    with contextlib.nullcontext() if server is None else contextlib.closing(server):
        pause_s = 0.0
        while (is_dropped := use.await_end(pause_s)) is None:
            watched = watchdog()
            if watched is not None:
                pause_s = watched.check()
            del watched
    if is_dropped:
        use.end()
