"""Writes copied snapshots in a thread, and agrees with the other ranks' writers on the step of the next one.

When one snapshot is written, rank 0 chooses the step of the next. Each rank confirms that it has not come to it yet;
otherwise a later one is chosen. Once a rank wants one soon, all look for an earlier step in the same way.

Thread safety: ``submit`` and ``close`` are the training thread's.
"""

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from gradcast.snapshots import files, frequency, store
from gradcast.snapshots.agreement import Agreement, LeftError
from gradcast.snapshots.next_step import NextStep
from gradcast.snapshots.report import Outcome, Report
from gradcast.snapshots.schedule import Schedule
from gradcast.snapshots.writing import Layout, Part, Writing

_log = logging.getLogger("gradcast")

_LOOK_S = 1.0  # how often it is looked whether a rank wants a snapshot soon
_OTHERS_AT_CLOSE_S = 120.0  # for ranks whose disks are slower; one that was killed never answers


@dataclasses.dataclass(frozen=True)
class SnapshotOptions:
    """The arguments of ``Handle.snapshots`` that say what a snapshot holds, and how often and how one is written."""

    overhead: float
    keep: int
    every: int | None
    loader: Any
    extra: Mapping[str, Any]
    write_bytes_per_s: float | None
    over_network: bool
    signals: Collection[int]


@dataclasses.dataclass(frozen=True)
class Place:
    """``name``: of these snapshots. ``completes``: this rank makes those of its folder complete. ``shared``: all ranks
    see one folder."""

    folder: Path
    name: str
    rank: int
    world_size: int
    completes: bool
    shared: bool


@dataclasses.dataclass
class Written:
    """This rank's part of one snapshot. ``failure``: the reason why it could not be copied."""

    step: int
    begun_s: float
    is_local: bool
    stall_s: float = 0.0
    failure: str | None = None
    values: Callable[[], tuple[dict[store.Path_, Any], dict[str, bytes]]] = lambda: ({}, {})  # tensors, objects
    paths: list[store.Path_] = dataclasses.field(default_factory=list)  # of all ranks; where ``completes``


class Writer:
    def __init__(
        self,
        place: Place,
        agreement: Agreement,
        schedule: Schedule,
        times: frequency.StepTimes,
        options: SnapshotOptions,
        pace: files.Pace,
    ) -> None:
        self._place, self._agreement, self._schedule, self._times = place, agreement, schedule, times
        self._options, self._pace = options, pace
        self.report = Report(place.folder, logs=place.rank == 0)
        self.next_step = NextStep(agreement, schedule, self.report, options.every, options.overhead)
        self._layout = Layout()
        self._changed = threading.Condition()
        self._waiting: Written | None = None
        self._tried = -1  # the last step whose snapshot is complete or has failed
        self.ended: str | None = None  # why
        self.is_busy = False  # from ``submit`` until the snapshot is complete or has failed
        self._thread = threading.Thread(target=self._run, name="gradcast snapshots", daemon=True)
        self._thread.start()

    # --- Called by other threads ---

    def submit(self, written: Written) -> None:
        with self._changed:
            self._waiting, self.is_busy = written, True
            self._changed.notify_all()

    def wait(self, limit_s: float | None = None) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self.is_busy, limit_s)

    def close(self, limit_s: float | None = None) -> None:
        """Returns when everything submitted is written. Idempotent. ``limit_s``: of the whole wait; None limits the
        wait for other ranks only, not this rank's write."""
        self._schedule.end()
        self._agreement.end_within(_OTHERS_AT_CLOSE_S if limit_s is None else limit_s)
        with self._changed:
            self._changed.notify_all()
        self._thread.join(limit_s)

    def give_up(self, why: str, *, others_answer: bool = True) -> None:
        """Ends snapshots on this rank, and so on all. ``others_answer``: the last one may still be complete."""
        self._set_ended(why)
        if not others_answer:
            self._agreement.end_within(0.0)
        self.close()

    def _set_ended(self, why: str) -> None:
        with self._changed:
            if self.ended is None:
                self.ended = why
                self.report.set(error=why)

    @property
    def last_is_written(self) -> bool:
        """Returns whether the snapshot that was asked for is complete, or cannot be."""
        asked_at = self.next_step.asked_at
        return self.ended is not None or (asked_at is not None and self._tried >= asked_at)

    # --- The thread ---

    def _run(self) -> None:
        written: Written | bool | None = None
        try:
            while (written := self._next_task()) is not None:
                if isinstance(written, Written):
                    outcome = self._write(written)
                    self._tried = written.step
                    self.report.written(written.step, written.stall_s, outcome)
                    self.next_step.choose(written.step, outcome)
                    with self._changed:
                        self.is_busy = self._waiting is not None
                        self._changed.notify_all()
                else:
                    self.next_step.meet(lambda: self._waiting is not None)
        except LeftError as left:
            if not self._schedule.has_ended:
                self._set_ended(str(left))
            elif isinstance(written, Written) and written.step != self._tried:
                _log.warning("the snapshot of step %d is not complete: %s", written.step, left)
        except Exception as error:  # of the store, which ends with rank 0
            self._set_ended(f"the ranks' writers have lost each other ({_described(error)})")
        finally:
            self._schedule.end()
            with self._changed:
                self.ended, self.is_busy = self.ended or "closed", False
                self._changed.notify_all()
            with contextlib.suppress(Exception):  # without the store the others end, too
                self._agreement.leave(self.ended)

    def _next_task(self) -> Written | bool | None:
        """Returns a submitted snapshot, True if a rank wants one soon, None in the end."""
        look_s = _LOOK_S if self._options.signals else None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._schedule.has_ended, look_s)
                written, self._waiting = self._waiting, None
                if written is not None or self._schedule.has_ended:
                    return written
            if self.next_step.is_asked():
                return True

    def _require_own_folder(self) -> None:
        if store.is_taken_over(self._place.folder, self._place.name):
            raise LeftError(
                f"another training writes its snapshots into {self._place.folder} now; end one of them, or give each a "
                "folder of its own"
            )

    def _write(self, written: Written) -> Outcome:
        self._require_own_folder()
        writing = Writing(self._place.folder, written.step, self._place.rank, self._layout, self._pace)
        error, part, network_s = written.failure, None, None
        if error is None:
            try:
                tensors, objects = written.values()
                part = writing.write_part(tensors, objects)
                network_s = self._network_s(sum(each.bytes for each in part.stored.values()))
            except Exception as failure:
                error = _described(failure)
        parts: list[Part | None] = []

        def decide_parts(answers: list[tuple[str | None, Part | None]]) -> tuple[str | None, list[Part | None]]:
            parts[:] = [each for _, each in answers]
            return _first_error([each for each, _ in answers]), [] if self._place.shared else parts

        error, sent = self._agreement.decide((error, part), decide_parts)
        if self._place.completes:
            parts = parts or sent
            self._layout.take_in(parts)
            if error is None:
                self._require_own_folder()
                try:
                    known = [each for each in parts if each is not None]
                    writing.complete(known, written.paths, world_size=self._place.world_size, is_local=written.is_local)
                except Exception as failure:
                    error = _described(failure)
            if error is not None:
                writing.abandon()
        cost_s, step_s = self._times.cost_s(written.stall_s)
        write_s = time.perf_counter() - written.begun_s
        own = Outcome(error, write_s, cost_s, step_s or max(write_s, 1e-3), self._schedule.step, network_s)
        outcome: Outcome = self._agreement.decide(own, _worst)
        self._delete_old(outcome)
        return outcome

    def _network_s(self, size: int) -> float | None:
        planned = None if self._pace.planned is None else self._pace.planned()
        if planned is None:
            return None
        return frequency.cost_over_network_s(planned, size, files.PIECE_BYTES, files.LONGEST_WAIT_S)

    def _delete_old(self, outcome: Outcome) -> None:
        if not self._place.completes or outcome.error is not None:
            return
        try:
            store.keep_newest(self._place.folder, self._options.keep)
        except OSError as error:
            self.report.deletion_failed(error)


def _worst(outcomes: list[Outcome]) -> Outcome:
    longest = {n: max(getattr(each, n) for each in outcomes) for n in ("write_s", "cost_s", "step_s", "step")}
    network_s = max((each.network_s for each in outcomes if each.network_s is not None), default=None)
    return Outcome(_first_error([each.error for each in outcomes]), **longest, network_s=network_s)


def _first_error(errors: list[str | None]) -> str | None:
    found = ((rank, error) for rank, error in enumerate(errors) if error is not None)
    return next((error if error.startswith("rank ") else f"rank {rank}: {error}" for rank, error in found), None)


def _described(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}"
