"""Small values of all ranks through the store of torch.distributed, during training.

Operations of several communicators have to begin in one order on all ranks (NCCL), and a block begins when its
gradients are ready. So what ranks tell each other while blocks may travel is no collective of any group, neither the
program's nor gradcast's.

Thread safety: one thread at a time.
"""

import pickle
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from gradcast.errors import Error

_POLL_S = 0.002  # grows to the longest one while nothing comes
_LONGEST_POLL_S = 0.05
_NAMED = 8  # the most ranks that a sentence names


class StoreGather:
    """``name``: never used before in this store, and the same on all ranks. ``timeout_s``: None for the store's."""

    def __init__(self, name: str, rank: int, world_size: int, timeout_s: float | None) -> None:
        # A connection of its own: on the one that all share, a request waits for those of other threads.
        self._store = dist.PrefixStore(f"gradcast {name}", dist.distributed_c10d._get_default_store()).clone()
        self._timeout_s = self._store.timeout.total_seconds() if timeout_s is None else timeout_s
        self._rank, self._world_size, self._round = rank, world_size, 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank; every rank has to call it. Raises Error(communication) that
        names the ranks that have not, after the timeout."""
        self._round += 1
        if self._rank > 0:
            self._store.set(self._key(self._rank), pickle.dumps(value))
            return pickle.loads(self._await([self._key("all")])[0])
        keys = [self._key(rank) for rank in range(1, self._world_size)]
        values = [value, *map(pickle.loads, self._await(keys))]
        self._store.set(self._key("all"), pickle.dumps(values))
        # All have said something in this round, so they have read the last one.
        for key in [*keys, f"{self._round - 1} all"]:
            self._store.delete_key(key)
        return values

    def _key(self, what: int | str) -> str:
        return f"{self._round} {what}"

    def _await(self, keys: Sequence[str]) -> list[bytes]:
        """Polls, so that Ctrl-C is heard."""
        poll_s, end_s = _POLL_S, time.monotonic() + self._timeout_s
        while not self._store.check(list(keys)):
            if time.monotonic() > end_s:
                raise Error(f"{self._missing(keys)} within {self._timeout_s:.0f} s", "communication")
            time.sleep(poll_s)
            poll_s = min(1.5 * poll_s, _LONGEST_POLL_S)
        return [self._store.get(key) for key in keys]

    def _missing(self, keys: Sequence[str]) -> str:
        if self._rank > 0:
            return "rank 0 has not answered"
        missing = [key.split()[1] for key in keys if not self._store.check([key])]
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        return f"rank {', '.join(missing[:_NAMED])}{more} has not come here"
