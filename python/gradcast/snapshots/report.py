"""Statistics of the snapshots, and their messages in the log.

Thread safety: any thread.
"""

import dataclasses
import logging
import shutil
import threading
import time
from pathlib import Path
from typing import Any

from gradcast.snapshots import frequency

_log = logging.getLogger("gradcast")

_SHOWN_CHANGE = 1.25  # a new frequency is logged if it differs by this factor


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a snapshot, the same on all ranks. The times are those of the slowest rank."""

    error: str | None
    write_s: float
    cost_s: float
    step_s: float
    step: int  # that the rank which is ahead has made by now
    network_s: float | None  # of the cost, as the plan predicts it


class Report:
    """``logs``: this rank logs the messages that concern all ranks."""

    def __init__(self, folder: Path, *, logs: bool) -> None:
        self._folder, self._logs = folder, logs
        self._lock = threading.Lock()
        self._written_s: float | None = None
        self._shown_every: int | None = None
        self._is_failing = self._deletion_fails = False
        keys = ("step", "age_s", "every", "overhead", "stall_ms", "write_ms", "cost_ms", "predicted_network_ms")
        self._stats: dict[str, Any] = dict.fromkeys((*keys, "copy_bytes")) | {"failed": 0, "error": None}

    def set(self, **values: Any) -> None:
        with self._lock:
            self._stats |= values

    def stats(self) -> dict[str, Any]:
        with self._lock:
            age_s = None if self._written_s is None else time.monotonic() - self._written_s
            return self._stats | {"age_s": age_s}

    def written(self, step: int, stall_s: float, outcome: Outcome) -> None:
        """The snapshot of this step is complete or has failed."""
        self.set(error=outcome.error)
        if outcome.error is None:
            self._written_s = time.monotonic()
            predicted_ms = None if outcome.network_s is None else outcome.network_s * 1e3
            ms = {"stall_ms": stall_s * 1e3, "write_ms": outcome.write_s * 1e3, "predicted_network_ms": predicted_ms}
            self.set(step=step, **ms)
        else:
            stats = self.stats()
            self.set(failed=stats["failed"] + 1)
            if not self._is_failing and self._logs:
                last = stats["step"]
                _log.warning(
                    "the snapshot of step %d could not be written to %s (%s; %s): training goes on, the last snapshot "
                    "is %s, and the next is tried later",
                    step, self._folder, outcome.error, _space(self._folder), "none" if last is None else f"step {last}",
                )  # fmt: skip
        self._is_failing = outcome.error is not None

    def deletion_failed(self, error: OSError) -> None:
        if not self._deletion_fails:
            _log.warning("an old snapshot in %s cannot be removed (%s)", self._folder, error)
        self._deletion_fails = True

    def chosen(self, every: int, write_s: float, cost_s: float, step_s: float, network_s: float | None) -> None:
        """The number of steps between snapshots, and the times of the last ones, see frequency.py."""
        self.set(every=every, cost_ms=cost_s * 1e3, overhead=cost_s / (every * step_s))
        shown = self._shown_every
        if self._logs and (shown is None or max(every / shown, shown / every) >= _SHOWN_CHANGE):
            _log.info("snapshots: %s", frequency.sentence(every, write_s, cost_s, step_s, network_s))
            self._shown_every = every

    def taken_soon(self, step: int) -> None:
        if self._logs:
            _log.info("snapshots: one is asked for, and taken at step %d", step)


def _space(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 1e6:.0f} MB are free"
    except OSError:
        return "the folder is gone"
