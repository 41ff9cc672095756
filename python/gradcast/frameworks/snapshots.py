"""Snapshots under a framework, whose loop goes on from checkpoints of its own: the newest snapshot becomes one.

What the loop has to restore is saved with each snapshot. Random states gradcast restores itself, since frameworks do so
at other moments, or not at all.
"""

import contextlib
import dataclasses
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

import gradcast
from gradcast.errors import refused
from gradcast.snapshots import store
from gradcast.snapshots.resuming import Resumed, restore_random_states, resumed
from gradcast.snapshots.whole import Whole, newest_step


@dataclasses.dataclass
class LoopState:
    """For ``extra``. ``read``: returns what the framework's loop has to restore; "steps": those that it has made."""

    read: Callable[[], dict[str, Any]]

    def state_dict(self) -> dict[str, Any]:
        return self.read()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise refused(
            "this snapshot was taken under a framework; give its trainer AttachCallback.checkpoint() in place of "
            "gradcast.resume()"
        )


class FrameworkSnapshots:
    """``folder``: one that all ranks see; None for no snapshots. ``options``: of handle.snapshots."""

    def __init__(self, folder: str | Path | None, options: dict[str, Any]) -> None:
        if options and folder is None:
            raise refused(f"AttachCallback got {', '.join(options)}, but no folder for snapshots; add snapshots=FOLDER")
        self._folder = None if folder is None else Path(folder).resolve()
        self._options = options
        self._given: Whole | None = None  # what the trainer is to go on from

    def checkpoint(self, name: str, write: Callable[[Whole, Path], None]) -> Path | None:
        """The newest snapshot in the form that ``write`` gives it, a file or folder ``name`` in its own folder; None if
        there is none. Any process of the training may make it, and the others take it. Raises Error(invalid_use),
        OSError."""
        if self._folder is None:
            raise refused("AttachCallback has no folder for snapshots; add snapshots=FOLDER")
        step = newest_step(self._folder)
        if step is None:
            return None
        whole = self._given = Whole(self._folder, step)
        place = store.place_of(self._folder, step) / name
        with _alone(place.with_name(f".{name}.lock")):
            if not place.exists():
                unfinished = place.with_name(f".{name}.{os.getpid()}")
                write(whole, unfinished)
                try:
                    unfinished.rename(place)
                except OSError:  # without locks another process may have made it
                    if not place.exists():
                        raise
        return place

    @property
    def is_on(self) -> bool:
        return self._folder is not None

    def take(self, handle: gradcast.Handle, module: nn.Module, steps: int, **arguments: Any) -> None:
        """Takes snapshots of a training that begins, or goes on from what ``checkpoint`` has made. ``steps``: that the
        framework's loop has made. ``arguments``: of handle.snapshots. Collective. Raises Error(invalid_use), on every
        rank, if one is not given what ``checkpoint`` has made. REQUIRES: ``is_on``."""
        whole, self._given = self._given, None
        if handle.mode == "local":
            raise refused(
                "with local steps every rank has parameters of its own, and a framework's checkpoint has room for one; "
                "leave out snapshots=FOLDER, or train without the framework"
            )
        refusals = handle._session.group.gather(self._refusal(whole, steps))
        if refusal := next(filter(None, refusals), None):
            raise refused(refusal)
        if whole is not None:
            is_same = len(whole.ranks) == handle.world_size
            own = whole.ranks[handle.rank if is_same else 0]
            resumed[self._folder] = Resumed(whole.step, own["plan"])
            if is_same:
                restore_random_states(own["random"], [module], next(module.parameters()).device)
        handle.snapshots(self._folder, **arguments, **self._options)

    def _refusal(self, whole: Whole | None, steps: int) -> str | None:
        if whole is not None and steps != whole.extra["loop"]["steps"]:
            return (
                f"the trainer begins at step {steps}, and the snapshot is of its step {whole.extra['loop']['steps']}; "
                "give the trainer AttachCallback.checkpoint() on every rank"
            )
        newest = newest_step(self._folder)
        if whole is None and self._folder not in resumed and newest is not None:
            return (
                f"{self._folder} holds a snapshot of step {newest}, from which this training does not go on; give the "
                "trainer AttachCallback.checkpoint() on every rank, or name another folder"
            )
        return None


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """No other process is in here for this file, if its file system has locks. They end with their process."""
    descriptor = os.open(lock, os.O_CREAT | os.O_RDWR)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
