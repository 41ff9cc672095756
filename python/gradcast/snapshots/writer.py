"""Writes copied snapshots in a thread, and agrees with the other ranks' writers on the step of the next one.

When one snapshot is written, rank 0 chooses the step of the next. Each rank confirms that it has not come to it yet;
otherwise a later one is chosen. Once a rank wants one soon, all look for an earlier step in the same way.

Thread safety: ``submit`` and ``close`` are the training thread's, ``ask_for_last`` and ``stats`` any thread's.
"""

import contextlib
import dataclasses
import logging
import math
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from gradcast.snapshots import files, frequency, store
from gradcast.snapshots.agreement import Agreement, LeftError
from gradcast.snapshots.schedule import Schedule
from gradcast.snapshots.writing import Layout, Part, Writing

_log = logging.getLogger("gradcast")

_LOOK_S = 1.0  # how often it is looked whether a rank wants a snapshot soon
_OTHERS_AT_CLOSE_S = 120.0  # for ranks whose disks are slower; one that was killed never answers
_SHOWN_CHANGE = 1.25  # the log tells a new frequency that differs by this factor


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


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """The result of a snapshot, the same on all ranks. The times are those of the slowest rank."""

    error: str | None
    write_s: float
    cost_s: float
    step_s: float
    step: int  # that the rank which is ahead has made by now
    network_s: float | None  # of the cost, as the plan predicts it


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
        self._look_s = _LOOK_S if options.signals else None
        self._layout = Layout()
        self._changed = threading.Condition()
        self._waiting: Written | None = None
        self._writing: Written | None = None
        self._tried = -1  # the last step whose snapshot is complete or has failed
        self._closing = False
        self.ended: str | None = None  # why
        self._asked_at: int | None = None  # this rank's step when it wanted one
        self._has_met = self._is_served = False
        self._costs = frequency.Costs()
        self._told_every: int | None = None
        self._is_failing = self._deletion_fails = False
        self.is_busy = False  # from ``submit`` until the snapshot is complete or has failed
        self._written_s: float | None = None
        keys = ("step", "age_s", "every", "overhead", "stall_ms", "write_ms", "cost_ms", "predicted_network_ms")
        self._stats: dict[str, Any] = dict.fromkeys((*keys, "copy_bytes")) | {"failed": 0, "error": None}
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
            self._closing = True
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
                self.ended = self._stats["error"] = why

    def ask_for_last(self) -> None:
        """Requests a last snapshot before the program ends. Safe in a signal handler."""
        self._asked_at = self._schedule.step

    @property
    def last_is_written(self) -> bool:
        """Returns whether the snapshot of ``ask_for_last`` is complete, or cannot be."""
        return self.ended is not None or (self._asked_at is not None and self._tried >= self._asked_at)

    def set_copy_bytes(self, size: int) -> None:
        self._stats["copy_bytes"] = size

    def stats(self) -> dict[str, Any]:
        with self._changed:
            age_s = None if self._written_s is None else time.monotonic() - self._written_s
            return self._stats | {"age_s": age_s}

    # --- The thread ---

    def _run(self) -> None:
        try:
            while (written := self._next_task()) is not None:
                if isinstance(written, Written):
                    self._writing = written
                    outcome = self._write(written)
                    self._note(written, outcome)
                    self._writing = None
                    self._agree_on_next(written.step, outcome)
                    with self._changed:
                        self.is_busy = self._waiting is not None
                        self._changed.notify_all()
                else:
                    self._meet()
        except LeftError as left:
            if not self._closing:
                self._set_ended(str(left))
            elif self._writing is not None:
                _log.warning("the snapshot of step %d is not complete: %s", self._writing.step, left)
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
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._closing, self._look_s)
                written, self._waiting = self._waiting, None
                if written is not None or self._closing:
                    return written
            if self._asked_at is not None and not self._has_met:
                self._agreement.ask_for_one()
            if not self._has_met and (self._asked_at is not None or self._agreement.is_asked_for_one()):
                return True

    def _require_own_folder(self) -> None:
        if store.is_taken_over(self._place.folder, self._place.name):
            raise LeftError(
                f"another training writes its snapshots into {self._place.folder} now; end one of them, or give each a "
                "folder of its own"
            )

    def _write(self, written: Written) -> _Outcome:
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
        own = _Outcome(error, write_s, cost_s, step_s or max(write_s, 1e-3), self._schedule.step, network_s)
        outcome: _Outcome = self._agreement.decide(own, _worst)
        self._delete_old(outcome)
        return outcome

    def _network_s(self, size: int) -> float | None:
        planned = None if self._pace.planned is None else self._pace.planned()
        if planned is None:
            return None
        return frequency.cost_over_network_s(planned, size, files.PIECE_BYTES, files.LONGEST_WAIT_S)

    def _delete_old(self, outcome: _Outcome) -> None:
        if not self._place.completes or outcome.error is not None:
            return
        try:
            store.keep_newest(self._place.folder, self._options.keep)
        except OSError as error:
            if not self._deletion_fails:
                _log.warning("an old snapshot in %s cannot be removed (%s)", self._place.folder, error)
            self._deletion_fails = True

    def _note(self, written: Written, outcome: _Outcome) -> None:
        error, self._tried = outcome.error, written.step
        with self._changed:
            self._stats["error"] = error
            if error is None:
                self._costs.add(outcome.write_s, outcome.cost_s, outcome.step_s)
                self._written_s = time.monotonic()
                ms = {"stall_ms": written.stall_s * 1e3, "write_ms": outcome.write_s * 1e3}
                predicted_ms = None if outcome.network_s is None else outcome.network_s * 1e3
                self._stats |= {"step": written.step, **ms, "predicted_network_ms": predicted_ms}
            else:
                self._stats["failed"] += 1
        if error is not None and not self._is_failing and self._place.rank == 0:
            last = self._stats["step"]
            _log.warning(
                "the snapshot of step %d could not be written to %s (%s; %s): training goes on, the last snapshot is "
                "%s, and the next is tried later",
                written.step, self._place.folder, error, _space(self._place.folder),
                "none" if last is None else f"step {last}",
            )  # fmt: skip
        self._is_failing = error is not None

    # --- When the next one is taken ---

    def _agree_on_next(self, step: int, outcome: _Outcome) -> None:
        medians_s = self._costs.medians_s()
        write_s, cost_s, step_s = medians_s or (outcome.write_s, outcome.cost_s, outcome.step_s)
        every = self._options.every or frequency.steps_between(write_s, cost_s, step_s, self._options.overhead)
        self._tell(every, write_s, cost_s, step_s, outcome.network_s)
        soon = self._agreement.decide(None, lambda _: self._agreement.is_asked_for_one() and not self._is_served)
        self._choose(outcome.step, lambda now: step + every * max(1, math.ceil((now - step) / every)), soon, None)

    def _meet(self) -> None:
        """Agrees on an earlier snapshot, which a rank wants; on none once some rank has begun the chosen one."""
        self._has_met = True
        pending = self._schedule.next
        steps = self._agreement.meet((self._schedule.step, pending), lambda: self._waiting is not None)
        if steps is None:
            return
        now = max(step for step, _ in steps)
        if {each for _, each in steps} == {pending} and pending is not None and now + 2 < pending:
            self._choose(now, lambda now: pending, True, pending)

    def _choose(self, now: int, usual: Callable[[int], int], soon: bool, instead_of: int | None) -> None:
        """Agrees on the next step. ``usual``: that of a snapshot without hurry, from the lowest possible step."""
        margin = 1
        while True:
            chosen = now + margin if soon else usual(now + margin)
            if instead_of is not None and chosen >= instead_of:
                return
            fits = self._schedule.propose(chosen, instead_of)
            own = (fits, self._schedule.step, self._schedule.next == instead_of, self._closing)
            agreed, now, possible, closing = self._agreement.decide(own, _combined)
            self._schedule.settle(agreed)
            if closing:
                raise LeftError("another rank has closed its snapshots")
            if agreed and soon:
                self._is_served = True
                if self._place.rank == 0:
                    _log.info("snapshots: one is asked for, and taken at step %d", chosen)
            if agreed or not possible:
                return
            margin *= 2

    def _tell(self, every: int, write_s: float, cost_s: float, step_s: float, network_s: float | None) -> None:
        self._stats |= {"every": every, "cost_ms": cost_s * 1e3, "overhead": cost_s / (every * step_s)}
        told = self._told_every
        if self._place.rank == 0 and (told is None or max(every / told, told / every) >= _SHOWN_CHANGE):
            _log.info("snapshots: %s", frequency.sentence(every, write_s, cost_s, step_s, network_s))
            self._told_every = every


def _combined(answers: list[tuple[bool, int, bool, bool]]) -> tuple[bool, int, bool, bool]:
    fits, steps, possible, closing = zip(*answers, strict=True)
    return all(fits), max(steps), all(possible), any(closing)


def _worst(outcomes: list[_Outcome]) -> _Outcome:
    longest = {n: max(getattr(each, n) for each in outcomes) for n in ("write_s", "cost_s", "step_s", "step")}
    network_s = max((each.network_s for each in outcomes if each.network_s is not None), default=None)
    return _Outcome(_first_error([each.error for each in outcomes]), **longest, network_s=network_s)


def _first_error(errors: list[str | None]) -> str | None:
    found = ((rank, error) for rank, error in enumerate(errors) if error is not None)
    return next((error if error.startswith("rank ") else f"rank {rank}: {error}" for rank, error in found), None)


def _described(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}"


def _space(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 1e6:.0f} MB are free"
    except OSError:
        return "the folder is gone"
