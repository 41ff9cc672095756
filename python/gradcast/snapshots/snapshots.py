"""Takes snapshots of a training that goes on: copies at the step, and writes in a thread.

A snapshot of step t is the state when forward t+1 begins. What is complete then is copied there; in overlap mode a
parameter whose update is still due is copied when that has run, part by part, so that nothing waits for the copy.

All ranks take the same step. The writers' threads agree on it, over a process group of their own: when one snapshot is
written, all learn the step of the next, and a rank that is beyond it already makes all choose a later one. A rank that
comes to a step that not all have confirmed yet waits for that.

Thread safety: the methods that hooks call from the training thread; ``_write`` has a thread of its own. ``_changed``
guards what both use.
"""

import atexit
import contextlib
import copy
import dataclasses
import datetime
import logging
import math
import shutil
import statistics
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from gradcast.errors import refused
from gradcast.snapshots import frequency, store
from gradcast.snapshots.sampler import ResumableLoader
from gradcast.snapshots.state import COMMON, Copies, from_bytes, own_path, random_state, to_bytes
from gradcast.training.ranks.group import Group, gather, lasting_group

_log = logging.getLogger("gradcast")

_FIRST_STEPS = 10  # before the first snapshot, so that a step's time is known
_COSTS_KEPT = 5  # snapshots whose median cost decides
_TIMEOUT_S = 1800.0  # of a message between the writers, who wait for the slowest disk
_LIMIT_AT_EXIT_S = 60.0
_SHOWN_CHANGE = 1.25  # the log tells a new frequency that differs by this factor


@dataclasses.dataclass
class _Taken:
    """A snapshot that is copied. ``awaiting``: parameters whose updates are due, None before forward begins."""

    step: int
    position: Any
    begun_s: float
    awaiting: set[str] | None = None
    stall_s: float = 0.0
    own: dict[str, Any] = dataclasses.field(default_factory=dict)
    common: dict[str, Any] = dataclasses.field(default_factory=dict)
    common_bytes: dict[str, bytes] = dataclasses.field(default_factory=dict)
    paths: list[store.Path_] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Report:
    """What each rank's writer tells the others when a snapshot is written or has failed."""

    step: int  # of this rank's training
    error: str | None
    write_s: float
    cost_s: float
    step_s: float


class Snapshots:
    """Returned by ``handle.snapshots``. The program need not keep it."""

    def __init__(
        self,
        folder: Path,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        group: Group,
        due_names: Callable[[], list[str]],
        complete_updates: Callable[[], None],
        plan_state: Callable[[], dict[str, Any]],
        *,
        start_step: int,
        overhead: float,
        keep: int,
        every: int | None,
        loader: Any,
        extra: Mapping[str, Any],
    ) -> None:
        """``due_names``: returns the parameters whose updates are due, which ``complete_updates`` runs. ``plan_state``:
        handle.state_dict()."""
        self._folder, self._optimizers = folder, list(optimizers)
        self._module = weakref.ref(module)
        self._due_names, self._complete_updates, self._plan_state = due_names, complete_updates, plan_state
        self._overhead, self._keep, self._every, self._loader, self._extra = overhead, keep, every, loader, dict(extra)
        self._rank, self._world_size = group.rank, group.world_size
        self._device = next(module.parameters()).device
        self._writers = _group_of_writers(group)
        self._copies: Copies | None = None
        self._changed = threading.Condition()
        self._step, self._next, self._confirmed = start_step, start_step + (every or _FIRST_STEPS), True
        self._taken: _Taken | None = None
        self._thread: threading.Thread | None = None
        self._last_step_s: float | None = None
        self._quiet_s: deque[float] = deque(maxlen=100)  # durations of steps without a snapshot
        self._slowed_s: list[float] = []  # durations of steps from a snapshot until it is written
        self._costs: deque[tuple[float, float, float]] = deque(maxlen=_COSTS_KEPT)  # write, cost, step
        self._told_every: int | None = None
        self._is_failing = False
        self._ended: str | None = None
        self._stats: dict[str, Any] = dict.fromkeys(
            ("step", "age_s", "every", "stall_ms", "write_ms", "overhead", "copy_bytes", "failed", "error")
        )
        self._stats["failed"] = 0
        self._written_s: float | None = None
        self._hooks: list[Any] = []
        atexit.register(self._close_at_exit)

    # --- What the program calls ---

    def wait(self, limit_s: float | None = None) -> None:
        """Waits until the snapshot that is being written, if any, is complete or has failed."""
        thread = self._thread
        if thread is not None:
            thread.join(limit_s)

    def close(self) -> None:
        """Ends the snapshots, after the one that is being written. If the last step is due for one, that is taken now.
        Idempotent; ``handle.detach()`` does it, too. Call it on every rank."""
        if self._ended is None and self._taken is not None and self._taken.awaiting is None:
            self._complete_updates()
            self._begin_copy()
        self._end("closed")
        while self._hooks:
            self._hooks.pop().remove()
        self.wait()

    def stats(self) -> dict[str, Any]:
        with self._changed:
            age_s = None if self._written_s is None else time.monotonic() - self._written_s
            return self._stats | {"age_s": age_s}

    def follow(self, hooks: Sequence[Any]) -> None:
        """``hooks``: by which the methods below are called; removed in the end."""
        self._hooks += hooks

    def _end(self, why: str) -> None:
        with self._changed:
            if self._ended is None:
                self._ended, self._next, self._taken = why, None, None
            self._changed.notify_all()
        atexit.unregister(self._close_at_exit)

    def _close_at_exit(self) -> None:
        self._end("the program ends")
        if getattr(sys, "last_value", None) is None:  # after an error other ranks may never answer
            self.wait(_LIMIT_AT_EXIT_S)

    # --- Hooks of the training loop ---

    def after_step(self, _names: Sequence[str]) -> None:
        """``step()`` has returned, once per step."""
        if self._ended is not None:
            return
        self._time_step()
        if self._taken is not None and self._taken.awaiting is None:
            self._give_up(
                "after the last snapshot's step no forward pass of the module has begun, where random state and "
                "buffers are copied; call the module itself: module(...)"
            )
            return
        with self._changed:
            self._step += 1
            # Confirmed within the time that a message takes: no writer waits for the training.
            while self._next == self._step and not self._confirmed and self._ended is None:
                self._changed.wait()
            if self._next != self._step or self._ended is not None:
                return
            self._next = None
        position = None if self._loader is None else copy.deepcopy(self._loader.state_dict())
        self._taken = _Taken(self._step, position, time.perf_counter())

    def before_forward(self, module: nn.Module, _inputs: Any, _compiled: bool) -> None:
        is_training = module.training and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
        if self._taken is not None and self._taken.awaiting is None and is_training:
            self._begin_copy()

    def on_update(self, names: list[str], _parameters: list[nn.Parameter]) -> None:
        """These parameters' updates have run."""
        taken = self._taken
        if taken is None or not taken.awaiting:
            return
        start_s = time.perf_counter()
        self._copies.copy(name for name in names if name in taken.awaiting)
        taken.awaiting.difference_update(names)
        taken.stall_s += time.perf_counter() - start_s
        if not taken.awaiting:
            self._finish_copy()

    def before_step(self, *_: Any) -> None:
        """The next update begins: nothing may be left to copy. Of several optimizers' steps without a forward pass in
        between, all belong to one step."""
        if self._taken is not None and self._taken.awaiting is not None:
            self._finish_copy()

    def _time_step(self) -> None:
        now_s, before_s = time.perf_counter(), self._last_step_s
        self._last_step_s = now_s
        if before_s is not None:
            is_slowed = self._taken is not None or (self._thread is not None and self._thread.is_alive())
            (self._slowed_s if is_slowed else self._quiet_s).append(now_s - before_s)

    # --- Copying ---

    def _begin_copy(self) -> None:
        start_s, taken, module = time.perf_counter(), self._taken, self._module()
        taken.own["random"] = random_state(self._device)
        if self._copies is None or not self._copies.fits(module):
            self._copies = Copies(module, self._optimizers, self._rank, self._world_size)
            size = self._copies.size_bytes
            if self._stats["copy_bytes"] != size:
                self._stats["copy_bytes"] = size
                _log.info("snapshots: rank %d keeps a copy of %.1f MB of the state", self._rank, size / 1e6)
        taken.own["plan"] = self._plan_state()
        if self._rank == 0:
            extra_state = {n: v for n, v in module.state_dict(keep_vars=True).items() if n.endswith("_extra_state")}
            taken.common_bytes = {
                "model": to_bytes(extra_state),
                "extra": to_bytes({name: each.state_dict() for name, each in self._extra.items()}),
                "loader": to_bytes(self._position(taken)),
            }
        self._slowed_s.clear()
        self._copies.begin()
        self._copies.copy_buffers()
        taken.awaiting = set(self._due_names())
        self._copies.copy(n for n, _ in module.named_parameters() if n not in taken.awaiting)
        taken.stall_s += time.perf_counter() - start_s
        if not taken.awaiting:
            self._finish_copy()

    def _position(self, taken: _Taken) -> Any:
        """The place behind the data of the step. The batch that the loop was handed since is the next step's, but if an
        epoch has ended since, what the program does there is in the state, too."""
        if isinstance(self._loader, ResumableLoader) and self._loader.state_dict()["epoch"] != taken.position["epoch"]:
            return self._loader.state_dict() | {"position": 0}
        return taken.position

    def _finish_copy(self) -> None:
        """All updates of the step have run: copies the rest, and starts the writer."""
        start_s, taken = time.perf_counter(), self._taken
        self._copies.copy_rest()
        if self._rank == 0:
            taken.common = {"version": 1, "step": taken.step, "world_size": self._world_size}
            taken.common["optimizers"] = self._copies.optimizers_state()
            taken.paths = self._copies.paths(self._world_size)
        taken.stall_s += time.perf_counter() - start_s
        self._taken = None
        self._thread = threading.Thread(target=self._write, args=(taken,), name="gradcast snapshot", daemon=True)
        self._thread.start()

    # --- Writing: the thread ---

    def _write(self, taken: _Taken) -> None:
        try:
            reports = self._write_together(taken)
            self._agree_on_next(taken.step, reports)
        except Exception as error:  # of the network: a rank has ended
            if self._ended is None:
                self._give_up(f"the ranks' writers have lost each other ({type(error).__name__}: {error})")

    def _write_together(self, taken: _Taken) -> list[_Report]:
        writing, error, part = store.Writing(self._folder, taken.step, self._rank), None, b""
        try:
            values: dict[store.Path_, Any] = dict(self._copies.values())
            values[own_path(self._rank)] = to_bytes(taken.own)
            if self._rank == 0:
                values[COMMON] = to_bytes(taken.common | {n: from_bytes(t) for n, t in taken.common_bytes.items()})
            part = writing.write_part(values)
        except Exception as failure:
            error = f"rank {self._rank}: {type(failure).__name__}: {failure}"
        answers = self._gather((error, part))
        error = next((each for each, _ in answers if each is not None), None)
        if self._rank == 0:
            error = error or self._complete(writing, [part for _, part in answers], taken)
            if error is not None:
                writing.abandon()
        write_s = time.perf_counter() - taken.begun_s
        quiet_s = statistics.median(self._quiet_s) if self._quiet_s else None
        slowed = list(self._slowed_s)
        cost_s = taken.stall_s if quiet_s is None else max(taken.stall_s, sum(slowed) - len(slowed) * quiet_s)
        reports = self._gather(_Report(self._step, error, write_s, cost_s, quiet_s or max(write_s, 1e-3)))
        self._note(taken, reports)
        return reports

    def _complete(self, writing: store.Writing, parts: list[bytes], taken: _Taken) -> str | None:
        try:
            writing.complete(parts, taken.paths)
            store.keep_newest(self._folder, self._keep)
        except Exception as failure:
            return f"rank 0: {type(failure).__name__}: {failure}"
        return None

    def _note(self, taken: _Taken, reports: list[_Report]) -> None:
        error = reports[0].error
        write_s, cost_s, step_s = (max(getattr(r, n) for r in reports) for n in ("write_s", "cost_s", "step_s"))
        with self._changed:
            self._stats["error"] = error
            if error is None:
                self._costs.append((write_s, cost_s, step_s))
                self._written_s = time.monotonic()
                self._stats |= {"step": taken.step, "stall_ms": taken.stall_s * 1e3, "write_ms": write_s * 1e3}
            else:
                self._stats["failed"] += 1
        if error is not None and not self._is_failing and self._rank == 0:
            last = self._stats["step"]
            _log.warning(
                "the snapshot of step %d could not be written to %s (%s; %s): training goes on, the last snapshot is "
                "%s, and the next is tried later",
                taken.step, self._folder, error, _space(self._folder), "none" if last is None else f"step {last}",
            )  # fmt: skip
        self._is_failing = error is not None

    def _agree_on_next(self, step: int, reports: list[_Report]) -> None:
        """All ranks choose the same step, which none has come to yet."""
        costs = self._costs or [tuple(max(getattr(r, n) for r in reports) for n in ("write_s", "cost_s", "step_s"))]
        write_s, cost_s, step_s = (statistics.median(values) for values in zip(*costs, strict=True))
        every = self._every or frequency.steps_between(write_s, cost_s, step_s, self._overhead)
        self._tell(every, write_s, cost_s, step_s)
        now, margin = max(each.step for each in reports), 1
        while True:
            chosen = step + every * max(1, math.ceil((now + margin - step) / every))
            with self._changed:
                fits = self._step < chosen and self._ended is None
                if fits:
                    self._next, self._confirmed = chosen, False
            answers = self._gather((fits, self._step, self._ended is not None))
            with self._changed:
                agreed = all(each for each, _, _ in answers)
                self._confirmed, self._next = True, self._next if agreed else None
                self._changed.notify_all()
            if agreed or any(ended for _, _, ended in answers):
                return
            now, margin = max(at for _, at, _ in answers), 2 * margin

    def _tell(self, every: int, write_s: float, cost_s: float, step_s: float) -> None:
        self._stats |= {"every": every, "overhead": cost_s / (every * step_s)}
        told = self._told_every
        if self._rank == 0 and (told is None or max(every / told, told / every) >= _SHOWN_CHANGE):
            _log.info("snapshots: %s", frequency.sentence(every, write_s, cost_s, step_s))
            self._told_every = every

    def _gather(self, value: Any) -> list[Any]:
        return [value] if self._writers is None else gather(self._writers, value, torch.device("cpu"))

    def _give_up(self, why: str) -> None:
        _log.warning("snapshots have ended on rank %d at step %d: %s", self._rank, self._step, why)
        self._stats["error"] = why
        self._end(why)


def _space(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 1e6:.0f} MB are free"
    except OSError:
        return "the folder is gone"


_groups: dict[tuple[int, ...], Any] = {}


def _group_of_writers(group: Group) -> Any:
    """A process group for the writers' threads alone; None for a single worker. Collective."""
    if group.world_size == 1:
        return None
    ranks = tuple(dist.get_process_group_ranks(group.shared))
    if ranks not in _groups:
        _groups[ranks] = lasting_group(ranks, datetime.timedelta(seconds=_TIMEOUT_S), "gloo", "snapshots")
    return _groups[ranks]


def check(group: Group, folder: Path, start_step: int, options: dict[str, Any], failure: str | None) -> None:
    """Raises Error(invalid_use) on every rank unless all ask for the same and see the same folder. Collective.
    ``failure``: why this rank cannot."""
    token = folder / ".shared"
    try:
        if group.rank == 0 and failure is None:
            folder.mkdir(parents=True, exist_ok=True)
            store.remove_leftovers(folder)
            token.write_text(f"{time.time_ns()}")
    except OSError as error:
        failure = f"the folder {folder} cannot be written ({error}); name one that can"
    text = group.from_first(token.read_text() if group.rank == 0 and failure is None else "")
    if failure is None and (not token.is_file() or token.read_text() != text):
        failure = (
            f"rank {group.rank} does not see rank 0's folder {folder}; name a folder of a file system that all hosts "
            "share"
        )
    answers = group.gather((failure, start_step, options))
    if group.rank == 0:
        with contextlib.suppress(OSError):
            token.unlink()
    first = next((each for each, _, _ in answers if each is not None), None)
    if first is not None:
        raise refused(first)
    for rank, answer in enumerate(answers):
        if answer != answers[0]:
            raise refused(
                f"rank 0 goes on from step {answers[0][1]} with {answers[0][2]}, rank {rank} from step {answer[1]} "
                f"with {answer[2]}; call gradcast.resume() and handle.snapshots() alike on all ranks"
            )
