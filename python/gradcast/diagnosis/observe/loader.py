"""Times a training loop's waits for DataLoaders, and the reading and preparing of their workers.

The clock of a worker's thread separates the two. Time in which it computes, or waits for a core, is preparation; time
in which it waits for anything else is reading. Workers write into shared memory that they inherit. Therefore only
workers that are forked after the timer was made are seen (fork is Linux's default up to Python 3.13). If a worker reads
in threads of its own, or from the page cache, that counts as preparation.

Thread safety: each worker writes its own slot; the training thread reads.
"""

import functools
import mmap
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import get_worker_info
from torch.utils.data._utils import fetch
from torch.utils.data.dataloader import _BaseDataLoaderIter

_SLOTS = 256  # more workers than this share slots
_FIELDS = struct.Struct("qqq")  # ns of reading, ns of preparing, batches
_RUN_QUEUE = Path("/proc/thread-self/schedstat")


class LoaderTimer:
    """Times all DataLoaders of this process until ``close()``."""

    def __init__(self) -> None:
        self.waited_ns = 0  # by the training thread; the observer resets it at each step
        self.workers = 0  # of the loader that was read last
        self._memory = mmap.mmap(-1, _SLOTS * _FIELDS.size)
        self._depth = 0
        self._replaced: list[tuple[type, str, Any]] = []
        self._replace(_BaseDataLoaderIter, "__next__", self._timed_next)
        for fetcher in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
            self._replace(fetcher, "fetch", self._timed_fetch)

    def close(self) -> None:
        for owner, name, original in self._replaced:
            setattr(owner, name, original)
        self._replaced = []

    def totals_ms(self) -> tuple[float, float, int]:
        """Returns reading ms, preparing ms and the number of batches, summed over all workers since construction."""
        slots = list(_FIELDS.iter_unpack(self._memory[:]))
        reading, preparing, batches = (sum(slot[field] for slot in slots) for field in range(3))
        return reading / 1e6, preparing / 1e6, batches

    def _replace(self, owner: type, name: str, make: Callable[[Callable], Callable]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, functools.wraps(original)(make(original)))
        self._replaced.append((owner, name, original))

    def _timed_next(self, original: Callable) -> Callable:
        def timed(iterator: Any) -> Any:
            start_ns = time.perf_counter_ns()
            self._depth += 1  # a dataset may itself iterate over a loader
            try:
                return original(iterator)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.waited_ns += time.perf_counter_ns() - start_ns
                    self.workers = iterator._num_workers

        return timed

    def _timed_fetch(self, original: Callable) -> Callable:
        def timed(fetcher: Any, indices: Any) -> Any:
            start_ns, start_busy_ns = time.perf_counter_ns(), _busy_ns()
            batch = original(fetcher, indices)
            duration_ns = time.perf_counter_ns() - start_ns
            self._add(duration_ns, min(duration_ns, _busy_ns() - start_busy_ns))
            return batch

        return timed

    def _add(self, duration_ns: int, busy_ns: int) -> None:
        worker = get_worker_info()
        offset = _FIELDS.size * (0 if worker is None else 1 + worker.id % (_SLOTS - 1))
        reading, preparing, batches = _FIELDS.unpack_from(self._memory, offset)
        _FIELDS.pack_into(self._memory, offset, reading + duration_ns - busy_ns, preparing + busy_ns, batches + 1)


def _busy_ns() -> int:
    """Returns the time in which this thread has computed or waited for a core."""
    try:
        waited_ns = int(_RUN_QUEUE.read_text().split()[1])
    except (OSError, IndexError, ValueError):
        waited_ns = 0  # not Linux: waiting for a core counts as reading
    return time.thread_time_ns() + waited_ns
