"""Decisions that the ranks' writers make together, through the store of torch.distributed.

Rank 0 decides from the values of all ranks. This is no collective: nobody waits for a rank that has ended.

Thread safety: ``decide`` is one thread's; the others may be called from any thread.
"""

import logging
import math
import pickle
import time
from collections.abc import Callable
from typing import Any

from gradcast.key_value_store import KeyValueStore

_log = logging.getLogger("gradcast")

_POLL_S = 0.002  # grows to the longest one while nothing comes
_LONGEST_POLL_S = 0.05
_SAID_AFTER_S = 60.0


class LeftError(Exception):
    """Error of a rank that no longer takes part. The text says which one, and why."""


class Agreement:
    """One rank's part in the decisions. ``store``: of these snapshots alone; None for a single worker."""

    def __init__(self, store: KeyValueStore | None, rank: int, world_size: int) -> None:
        self._shared, self._rank, self._world_size, self._round = store, rank, world_size, 0
        self._has_met = False
        self._end_s: float | None = None  # in monotonic time

    @property
    def _store(self) -> KeyValueStore:
        assert self._shared is not None, "a single worker asks nobody"
        return self._shared

    def decide(self, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """Returns the result of ``decide`` on rank 0 for the values of all ranks, in rank order. Every rank makes the
        same calls. Raises LeftError if a rank has left without giving its value."""
        if self._shared is None:
            return decide([value])
        self._round += 1
        name = f"{self._round}"
        if self._rank > 0:
            self._store.set(f"{name} {self._rank}", pickle.dumps(value))
            return pickle.loads(self._await([f"{name} decided"])[0])
        keys = [f"{name} {rank}" for rank in range(1, self._world_size)]
        decision = decide([value, *map(pickle.loads, self._await(keys))])
        self._store.set(f"{name} decided", pickle.dumps(decision))
        # All have said something in this round, so they have read the last one.
        for key in [*keys, f"{self._round - 1} decided"]:
            self._store.delete_key(key)
        return decision

    def meet(self, value: Any, must_stop: Callable[[], bool]) -> list[Any] | None:
        """Returns the values of all ranks once all have called this, each once. None if rank 0 ``must_stop`` before, or
        waits in ``decide`` after a rank has asked: otherwise each could wait for the other elsewhere."""
        if self._shared is None:
            return [value]
        if self._rank > 0:
            self._store.set(f"meet {self._rank}", pickle.dumps(value))
            values: list[Any] | None = pickle.loads(self._await(["meet decided"])[0])
            return values
        keys = [f"meet {rank}" for rank in range(1, self._world_size)]
        found = [] if self._has_met else self._await(keys, must_stop)
        values = [value, *map(pickle.loads, found)] if found else None
        self._end_meeting(values)
        return values

    def _end_meeting(self, values: list[Any] | None) -> None:
        if not self._has_met:
            self._store.set("meet decided", pickle.dumps(values))
            self._has_met = True

    def end_within(self, limit_s: float) -> None:
        """Limits all waits from now on; longer ones raise LeftError, since a rank that was killed reports nothing."""
        self._end_s = min(time.monotonic() + limit_s, self._end_s or math.inf)

    def leave(self, why: str) -> None:
        if self._shared is not None:
            self._store.set("left", f"rank {self._rank}: {why}")

    def ask_for_one(self) -> None:
        """Notifies all ranks that one wants a snapshot soon."""
        if self._shared is not None:
            self._store.set("asked", "1")

    def is_asked_for_one(self) -> bool:
        return self._shared is not None and self._store.check(["asked"])

    def _await(self, keys: list[str], must_stop: Callable[[], bool] | None = None) -> list[bytes]:
        """Returns their values, none if this rank ``must_stop`` before."""
        poll_s, since_s, said = _POLL_S, time.monotonic(), False
        while not self._store.check(keys):
            if must_stop is not None and must_stop():
                return []
            if must_stop is None and self._rank == 0 and not self._has_met and self._store.check(["asked"]):
                self._end_meeting(None)
            if self._store.check(["left"]) and not self._store.check(keys):
                raise LeftError(self._store.get("left").decode())
            if self._end_s is not None and time.monotonic() > self._end_s:
                raise LeftError(f"{self._ranks_of(keys)} did not answer")
            if not said and time.monotonic() > since_s + _SAID_AFTER_S:
                said = True
                waited_for = self._ranks_of(keys)
                _log.warning("snapshots: rank %d has waited %.0f s for %s", self._rank, _SAID_AFTER_S, waited_for)
            time.sleep(poll_s)
            poll_s = min(1.5 * poll_s, _LONGEST_POLL_S)
        return [self._store.get(key) for key in keys]

    def _ranks_of(self, keys: list[str]) -> str:
        """The ranks whose values are missing."""
        if self._rank > 0:
            return "rank 0"
        missing = [key.split()[-1] for key in keys if not self._store.check([key])]
        return f"rank {', '.join(missing[:10])}"
