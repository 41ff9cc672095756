"""Small values of all ranks through the store of torch.distributed, during training.

Operations of several communicators have to begin in one order on all ranks (NCCL), and a block begins when its
gradients are ready. So while blocks may be in flight, ranks exchange values without a collective of any group, neither
the program's nor gradcast's.

Thread safety: one thread at a time.
"""

import pickle
import threading
import time
from collections.abc import Sequence
from typing import Any

from gradcast.errors import Error
from gradcast.key_value_store import KeyValueStore, default_store, own_store

_POLL_S = 0.002  # grows to the longest one while nothing comes
_LONGEST_POLL_S = 0.5
_LOOK_S = 0.2  # Python handles Ctrl-C in between
_LATE_S = 5.0  # grace period after the timeout before the store counts as dead
_HEARD_WITHIN_S = 10.0  # rank 0 waits for so long until all have its answer, for its store may end with it
_NAMED = 8  # the most ranks that a sentence names


class StoreGather:
    """``name``: never used before in this store, and the same on all ranks. ``timeout_s``: None for the store's."""

    def __init__(self, name: str, rank: int, world_size: int, timeout_s: float | None) -> None:
        self._name, self._timeout_s = f"gradcast {name}", timeout_s
        self._rank, self._world_size, self._round = rank, world_size, 0
        self._store: KeyValueStore | None = None
        self._failure: Error | None = None

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank; every rank has to call it. Raises Error(communication) that
        names the ranks that have not, after the timeout; from then on always."""
        if self._failure is None:
            try:
                return self._gather_within_limit(value)
            except Error as error:
                self._failure = error
            except BaseException:  # Ctrl-C, while the thread of this round goes on
                self._failure = Error("an agreement through the store was interrupted on this rank", "communication")
                raise
        raise self._failure

    def _gather_within_limit(self, value: Any) -> list[Any]:
        limit_s = default_store().timeout.total_seconds() if self._timeout_s is None else self._timeout_s
        ended: list[list[Any] | BaseException] = []

        def run() -> None:
            try:
                self._store = self._store or own_store(self._name)
                ended.append(self._gather(self._store, value, limit_s))
            except BaseException as failure:
                ended.append(failure)

        # If the store's host is stopped, torch's client waits without end.
        thread = threading.Thread(target=run, name="gradcast store", daemon=True)
        thread.start()
        end_s = time.monotonic() + limit_s + _LATE_S
        while thread.is_alive() and time.monotonic() < end_s:
            thread.join(_LOOK_S)
        if not ended:
            raise Error(f"the store of torch.distributed has not answered within {limit_s:.0f} s", "communication")
        found = ended[0]
        if isinstance(found, Error):
            raise found
        if isinstance(found, BaseException):
            raise Error(f"the store of torch.distributed has failed ({found})", "communication") from found
        return found

    def _gather(self, store: KeyValueStore, value: Any, limit_s: float) -> list[Any]:
        self._round += 1
        end_s = time.monotonic() + limit_s
        others = range(1, self._world_size)
        if self._rank > 0:
            store.set(self._key(self._rank), pickle.dumps(value))
            self._await(store, [self._key("all")], end_s, limit_s)
            values: list[Any] = pickle.loads(store.get(self._key("all")))
            store.set(self._key(f"{self._rank} heard"), b"")
            return values
        keys = [self._key(rank) for rank in others]
        self._await(store, keys, end_s, limit_s)
        values = [value, *(pickle.loads(store.get(key)) for key in keys)]
        store.set(self._key("all"), pickle.dumps(values))
        heard = [self._key(f"{rank} heard") for rank in others]
        _missing_after(store, heard, time.monotonic() + _HEARD_WITHIN_S)
        for key in [*keys, *heard, f"{self._round - 1} all"]:
            store.delete_key(key)
        return values

    def _key(self, what: int | str) -> str:
        return f"{self._round} {what}"

    def _await(self, store: KeyValueStore, keys: Sequence[str], end_s: float, limit_s: float) -> None:
        missing = _missing_after(store, keys, end_s)
        if not missing:
            return
        if self._rank > 0:
            raise Error(f"rank 0 has not answered within {limit_s:.0f} s", "communication")
        ranks = [key.split()[1] for key in missing]
        more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
        named = ", ".join(ranks[:_NAMED])
        raise Error(f"rank {named}{more} has not come here within {limit_s:.0f} s", "communication")


def _missing_after(store: KeyValueStore, keys: Sequence[str], end_s: float) -> list[str]:
    """Waits until all are there. Returns the missing ones at the end."""
    missing, poll_s = list(keys), _POLL_S
    while missing := [key for key in missing if not store.check([key])]:
        if time.monotonic() > end_s:
            break
        time.sleep(poll_s)
        poll_s = min(1.5 * poll_s, _LONGEST_POLL_S)
    return missing
