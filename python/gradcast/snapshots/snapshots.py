"""Takes snapshots of a running training: copies the state of a step, and has a thread write it.

A snapshot of step t is the state when forward t+1 begins. Everything complete is copied there; in overlap mode a
parameter whose update is pending is copied after the update, part by part, so that nothing waits for the copy.

Thread safety: the training thread.
"""

import atexit
import contextlib
import copy
import dataclasses
import logging
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradcast.errors import Error
from gradcast.random_state import random_state
from gradcast.snapshots import store
from gradcast.snapshots.agreement import Agreement
from gradcast.snapshots.files import Pace
from gradcast.snapshots.frequency import StepTimes
from gradcast.snapshots.plain import from_bytes, require_plain, to_bytes
from gradcast.snapshots.resuming import Resumed, resumed
from gradcast.snapshots.sampler import ResumableLoader
from gradcast.snapshots.schedule import Schedule
from gradcast.snapshots.signals import Signals
from gradcast.snapshots.state import Copies, extra_state
from gradcast.snapshots.store import Path_
from gradcast.snapshots.writer import Place, SnapshotOptions, Writer, Written
from gradcast.training.state import TrainingState

_log = logging.getLogger("gradcast")

_FIRST_STEPS = 10  # before the first snapshot, so that a step's time is known
_LIMIT_AT_EXIT_S = 60.0
_LIMIT_AFTER_ERROR_S = 10.0


@dataclasses.dataclass
class _Taken:
    """A snapshot being copied. ``awaiting``: parameters whose updates are pending, None before forward begins."""

    written: Written
    position: Any = None
    awaiting: set[str] | None = None
    own: dict[str, Any] = dataclasses.field(default_factory=dict)
    rounds: dict[Path_, torch.Tensor] = dataclasses.field(default_factory=dict)  # with local steps
    saved: dict[str, bytes] = dataclasses.field(default_factory=dict)  # objects of the model and of ``extra``, in order
    optimizers: list[dict[str, Any]] | None = None


class Snapshots:
    """Returned by ``handle.snapshots``. The program need not keep it."""

    def __init__(
        self,
        place: Place,
        agreement: Agreement,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        training: TrainingState,
        start_step: int,
        options: SnapshotOptions,
        pace: Pace,
    ) -> None:
        self._place, self._optimizers = place, list(optimizers)
        self._module = weakref.ref(module)
        self._training, self._options = training, options
        self._copies: Copies | None = None
        self._taken: _Taken | None = None
        self._last_step_s: float | None = None  # when it ended
        self._step_times = StepTimes()
        self._schedule = Schedule(start_step, start_step + (options.every or _FIRST_STEPS))
        self._writer = Writer(place, agreement, self._schedule, self._step_times, options, pace)
        self._signals = Signals(options.signals, self._writer.next_step.ask)
        self._has_ended = False
        self._registration: Any = None
        self._hooks: list[Any] = []
        atexit.register(self._close_at_exit)

    @property
    def _is_local(self) -> bool:
        return self._training.session.mode == "local"

    @property
    def _prefix(self) -> Path_:
        return store.local_path(self._place.rank) if self._is_local else ()

    # --- What the program calls ---

    def wait(self, limit_s: float | None = None) -> None:
        """Waits until the snapshot that is being written, if any, is complete or has failed."""
        self._writer.wait(limit_s)

    def close(self) -> None:
        """Ends the snapshots, after the one that is being written. If one of the last step is scheduled, it is taken
        now. Idempotent; ``handle.detach()`` calls it, too. Call it on every rank."""
        try:
            if self._taken is not None and self._writer.ended is None:
                self._training.session.complete_updates()
                self.begin_copy()
                if self._taken is not None:
                    self._finish_copy()
            if self._registration is not None:
                self._registration.remove()
        finally:
            self._end()

    def abandon(self) -> None:
        """Ends the snapshots after gradcast has left the module, perhaps because of an error."""
        self._end(_LIMIT_AFTER_ERROR_S)

    def stats(self) -> dict[str, Any]:
        return self._writer.report.stats()

    def follow(self, registration: Any, hooks: Sequence[Any]) -> None:
        """Keeps the hooks that call the methods below, to remove them in the end."""
        self._registration, self._hooks = registration, list(hooks)

    def _end(self, limit_s: float | None = None) -> None:
        if not self._has_ended:
            resumed[self._place.folder] = Resumed(self._schedule.step, module=self._module)
        self._has_ended, self._taken, self._registration = True, None, None
        while self._hooks:
            self._hooks.pop().remove()
        self._writer.close(limit_s)
        atexit.unregister(self._close_at_exit)
        self._signals.restore()
        self._signals.pass_on()

    def _close_at_exit(self) -> None:
        # After an error other ranks may never answer.
        self._end(_LIMIT_AT_EXIT_S if getattr(sys, "last_value", None) is None else 0.0)

    # --- Hooks of the training loop ---

    def after_step(self, _names: Sequence[str]) -> None:
        """Called once per step, when ``step()`` has returned."""
        if self._has_ended:
            return
        now_s = time.perf_counter()
        if self._last_step_s is not None:
            self._step_times.add(now_s - self._last_step_s, is_busy=self._taken is not None or self._writer.is_busy)
        self._last_step_s = now_s
        if self._taken is not None and self._taken.awaiting is None:
            self._writer.give_up(
                "after the last snapshot's step no forward pass of the module has begun, where random state and "
                "buffers are copied; call the module itself: module(...)"
            )
        if self._writer.ended is not None:
            step, why = self._schedule.step, self._writer.ended
            _log.warning("snapshots have ended on rank %d at step %d: %s", self._place.rank, step, why)
            self.close()
            return
        if self._signals.received and self._writer.last_is_written:
            _log.info("snapshots: the last one is of step %s; the signal takes effect now", self.stats()["step"])
            self.close()
            return
        try:
            is_due = self._schedule.advance()
        except TimeoutError as error:
            is_due = False
            self._writer.give_up(str(error), others_answer=False)
        if is_due:
            self._taken = _Taken(Written(self._schedule.step, time.perf_counter(), self._is_local))
            with self._copying(self._taken):
                if self._options.loader is not None:
                    self._taken.position = copy.deepcopy(self._options.loader.state_dict())

    def before_forward(self, module: nn.Module, _inputs: Any, _compiled: bool) -> None:
        lends = self._training.session.rounds.lends
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1 and not lends:
            self.begin_copy()

    def on_update(self, names: list[str], _parameters: list[nn.Parameter]) -> None:
        """Called when the updates of these parameters have run."""
        taken = self._taken
        if taken is None or not taken.awaiting:
            return
        with self._copying(taken):
            self._copied().copy(name for name in names if name in taken.awaiting)
            taken.awaiting.difference_update(names)
        if not taken.awaiting:
            self._finish_copy()

    def before_step(self, *_: Any) -> None:
        """Called when the next update begins: nothing may be left to copy. Steps of several optimizers without a
        forward pass in between belong to one step."""
        if self._taken is not None and self._taken.awaiting is not None:
            self._finish_copy()

    # --- Copying ---

    @contextlib.contextmanager
    def _copying(self, taken: _Taken) -> Iterator[None]:
        """Measures the time. A failure (no memory, an object that cannot be saved) ends this snapshot only."""
        start_s = time.perf_counter()
        try:
            yield
        except Exception as failure:
            if isinstance(failure, Error) and failure.code == "communication":
                raise  # of the training itself: updates that this waits for
            taken.written.failure = f"copying: {type(failure).__name__}: {failure}"
            taken.awaiting = taken.awaiting and set()
        finally:
            taken.written.stall_s += time.perf_counter() - start_s

    def _copied(self) -> Copies:
        assert self._copies is not None, "a snapshot is being copied"
        return self._copies

    def begin_copy(self) -> None:
        """Copies the complete part of a scheduled snapshot, where a forward pass or a step without one begins."""
        taken = self._taken
        if taken is None or taken.awaiting is not None:
            return
        self._step_times.touch()
        taken.awaiting = set()
        if taken.written.failure is None:
            with self._copying(taken):
                self._copy_complete(taken)
        if not taken.awaiting:
            self._finish_copy()

    def _copy_complete(self, taken: _Taken) -> None:
        """Copies all but the parameters whose updates are pending."""
        module = self._module()
        assert module is not None, "its forward pass begins, or the program closes its snapshots"
        taken.own["random"] = random_state(next(module.parameters()).device)
        plan = self._training.saved()
        if self._is_local:
            tensors = plan.pop("tensors")
            taken.rounds = {(what, name): each for what, named in tensors.items() for name, each in named.items()}
        if self._copies is None or not self._copies.fits(module):
            part = (0, 1) if self._is_local else (self._place.rank, self._place.world_size)
            self._copies = Copies(module, self._optimizers, *part)
            self._tell_size(taken)
        taken.own |= {"plan": plan, "loader": self._position(taken)}
        if self._is_local or self._place.rank == 0:
            states = {"the model": extra_state(module)}
            states |= {f"extra[{name!r}]": each.state_dict() for name, each in self._options.extra.items()}
            taken.saved = {what: to_bytes(state, what) for what, state in states.items()}
        self._copies.begin()
        taken.awaiting = set(self._training.session.pending_names())
        self._copies.copy(n for n, _ in module.named_parameters() if n not in taken.awaiting)

    def _tell_size(self, taken: _Taken) -> None:
        size = self._copied().size_bytes + sum(each.nbytes for each in taken.rounds.values())
        if self.stats()["copy_bytes"] != size:
            self._writer.report.set(copy_bytes=size)
            _log.info("snapshots: rank %d keeps a copy of %.1f MB of the state", self._place.rank, size / 1e6)

    def _position(self, taken: _Taken) -> Any:
        """Returns the place behind the data of the step. A batch that the loop was handed since belongs to the next
        step, but if an epoch has ended since, the program's work there is in the state, too."""
        if (
            isinstance(self._options.loader, ResumableLoader)
            and self._options.loader.state_dict()["epoch"] != taken.position["epoch"]
        ):
            return self._options.loader.state_dict() | {"position": 0}
        return taken.position

    def _finish_copy(self) -> None:
        """Copies the rest when all updates of the step have run, and has it written."""
        taken, place = self._taken, self._place
        assert taken is not None, "a snapshot is being copied"
        written = taken.written
        with self._copying(taken):
            if written.failure is None:
                copies = self._copied()
                copies.copy_rest()
                if place.completes:
                    written.paths = [(*self._prefix, *path) for path in (*copies.paths(), *taken.rounds)]
                if self._is_local or place.rank == 0:
                    taken.optimizers = copies.optimizers_state()
                written.values = lambda: self._values(taken)
        self._taken = None
        self._writer.submit(written)

    def _values(self, taken: _Taken) -> tuple[dict[Path_, torch.Tensor], dict[str, bytes]]:
        """Returns this rank's part: tensors by path, and files of objects by name. The writer's thread calls it. Raises
        Error(invalid_use) for more than plain data."""
        tensors = self._copied().values() | taken.rounds
        others = {"the loader": taken.own["loader"], "the optimizer": taken.optimizers}
        for what, data in (taken.saved | {what: to_bytes(each, what) for what, each in others.items()}).items():
            require_plain(data, what)
        objects: dict[str, Any] = {store.file_of(self._place.rank): taken.own}
        if taken.optimizers is not None:
            common: dict[str, Any] = {"has_loader": self._options.loader is not None}
            common["is_global"] = self._options.loader is None or isinstance(self._options.loader, ResumableLoader)
            common["optimizers"] = taken.optimizers
            common["model"], *extra = map(from_bytes, taken.saved.values())
            common["extra"] = dict(zip(self._options.extra, extra, strict=True))
            if self._is_local:
                taken.own["common"] = common
            else:
                objects[store.COMMON] = common
        files = {name: to_bytes(each, name) for name, each in objects.items()}
        # A few of local steps have other strides.
        return {(*self._prefix, *path): each.contiguous() for path, each in tensors.items()}, files
