"""Who waits for whom: said when a step does not go on, and when it has failed.

Ranks that wait write what they wait for on rank 0's board. That needs no help of a rank that hangs or is gone, and
whoever has written nothing is the one that the others wait for. The lowest rank that has written speaks for all, so
that one paragraph appears and not one per rank.

Thread safety: the training thread, and one thread that looks from time to time how long it has been waiting.
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
from collections.abc import Iterator, Sequence
from typing import Any

from gradcast import _core
from gradcast.errors import Error
from gradcast.training.options import Options
from gradcast.training.ranks.group import Group
from gradcast.training.ranks.status_server import ask, open_board

_log = logging.getLogger("gradcast")
# How long a rank listens for the others.
_LISTEN_S = 1.5
_POLL_S = 0.1
_TIMEOUT_SHARE = 0.25
_LOOKS = 4  # before a wait counts as long
_RECORDS_DUMPED = 2
_BLOCKS_DUMPED = 64


class StallWatchdog:
    """Of one rank."""

    def __init__(self, group: Group, options: Options, engine: _core.Engine) -> None:
        self._group = group
        self._engine = engine
        limit_s = options.stall_warning_s
        self._warn_after_s = limit_s if group.timeout_s is None else min(limit_s, _TIMEOUT_SHARE * group.timeout_s)
        self._folder = options.dump_dir or tempfile.gettempdir()
        self._board, self._address = open_board(group)
        self._failure: Error | None = None
        self._waiting: _Waiting | None = None
        self._over = threading.Event()
        looking = (weakref.ref(self), self._over)
        self._thread = threading.Thread(target=_look, args=looking, name="gradcast-watch", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def waiting(self, what: str | None = None) -> Iterator[None]:
        """Around everything that waits for other ranks. ``what``: for people; None: what the engine waits for."""
        waiting = self._waiting = _Waiting(what, time.monotonic())
        try:
            yield
        except Error as error:
            raise self.explain(error) from None
        finally:
            self._waiting = None
            if waiting.said and self._address is not None:
                ask(self._address, "stall", self._group.rank, None)

    def close(self) -> None:
        """Idempotent."""
        self._over.set()
        if self._board is not None:
            self._board.close()
        if self._thread is not threading.current_thread():
            self._thread.join()  # at most as long as it listens to the others

    def look(self) -> float:
        """Says what is waited for, once, if that has taken long. Returns in how many seconds to look again."""
        waiting = self._waiting
        if waiting is not None and not waiting.said:
            left_s = waiting.since_s + self._warn_after_s - time.monotonic()
            if left_s > 0:
                return left_s
            self._say(waiting)
        return self._warn_after_s / _LOOKS

    def _say(self, waiting: "_Waiting") -> None:
        text = waiting.what or self._engine.waiting_for()
        waited_s = time.monotonic() - waiting.since_s
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - waited_s))
        waiting.said = True
        entry = {"iteration": self._engine.counters().iterations, "text": text}
        heard = self._exchange("stall", entry, waiting)
        if self._waiting is not waiting:
            if self._address is not None:
                ask(self._address, "stall", self._group.rank, None)
            return
        if heard is not None and min(heard) != self._group.rank:
            return
        who = "Rank 0, which knows who else waits, does not answer." if heard is None else self._who(heard)
        _log.warning("waiting for %.0f s, since %s: %s. %s", waited_s, since, text, who)

    def explain(self, error: Error) -> Error:
        """The error of the network with what the other ranks say, told once; the last events of all go to a file."""
        if error.code != "communication":
            return error
        if self._failure is None:
            entry = {
                "iteration": self._engine.counters().iterations,
                "error": str(error),
                "waiting_for": self._engine.waiting_for(),
                "iterations": self._records(),
            }
            reached = self._exchange("failure", entry)
            self._failure = Error(f"{error}. {self._verdict(reached, entry)}", error.code)
        return self._failure

    def _verdict(self, reached: dict[int, Any] | None, own: dict[str, Any]) -> str:
        if reached is None:
            words = "Rank 0, which knows who else failed, does not answer: it has ended, or is cut off."
            reached = {self._group.rank: own}
        else:
            words = self._who(reached, "failed")
        if min(reached) != self._group.rank:
            return words
        try:
            return f"{words} The last events of {_ranks(sorted(reached))} are in {self._dump(reached)}"
        except OSError as error:
            return f"{words} (Their last events could not be written: {error})"

    def _dump(self, reached: dict[int, Any]) -> str:
        handle, path = tempfile.mkstemp(prefix="gradcast-failure-", suffix=".json", dir=self._folder)
        with os.fdopen(handle, "w") as file:
            silent = [rank for rank in range(self._group.world_size) if rank not in reached]
            json.dump({"world_size": self._group.world_size, "silent": silent, "ranks": reached}, file, indent=1)
        return path

    def _who(self, heard: dict[int, Any], doing: str = "waiting") -> str:
        """Of which ranks anything was heard, in sentences."""
        silent = [rank for rank in range(self._group.world_size) if rank not in heard]
        words = f"{doing.capitalize()}: {_ranks(sorted(heard))}"
        own = heard[self._group.rank].get("iteration")
        for rank, entry in heard.items():
            if entry.get("iteration") != own:
                words += f", rank {rank} in another step ({entry['iteration']} against {own})"
        if not silent:
            return f"{words}."
        return f"{words}; nothing was heard of {_ranks(silent)}: stopped, slow, gone, or elsewhere in the program."

    def _exchange(self, kind: str, entry: dict[str, Any], during: "_Waiting | None" = None) -> dict[int, Any] | None:
        """Writes this rank's entry and listens for the others': by rank, its own included. None without an answer."""
        deadline_s = time.monotonic() + _LISTEN_S
        while self._address is not None:
            heard = ask(self._address, kind, self._group.rank, entry)
            ended = during is not None and self._waiting is not during
            if heard is None or ended or len(heard) == self._group.world_size or time.monotonic() > deadline_s:
                return heard
            time.sleep(_POLL_S)
        return None

    def _records(self) -> list[dict[str, Any]]:
        """The last iterations: per block when it was ready, started and finished, in ms before now."""
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


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


@dataclasses.dataclass
class _Waiting:
    what: str | None
    since_s: float
    said: bool = False


def _look(watch: "weakref.ref[StallWatchdog]", over: threading.Event) -> None:
    """The thread. It does not keep the session alive."""
    pause_s = 0.0
    while not over.wait(pause_s):
        watched = watch()
        if watched is None:
            return
        pause_s = watched.look()
        del watched
