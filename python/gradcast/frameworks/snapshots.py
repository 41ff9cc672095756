"""Snapshots under a framework, whose loop resumes from checkpoints of its own: the newest snapshot becomes one.

The loop's own state is saved with each snapshot. gradcast restores random states itself, since frameworks do so at
other moments, or not at all.
"""

import contextlib
import dataclasses
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

import gradcast
from gradcast.errors import refused
from gradcast.snapshots import store
from gradcast.snapshots.files import DamageError, is_sealed, parsed, sealed, stored_in
from gradcast.snapshots.newest import on_every_rank
from gradcast.snapshots.resuming import Resumed, restore_random_states, resumed
from gradcast.snapshots.whole import Whole, newest
from gradcast.training.state import TrainingState


@dataclasses.dataclass
class LoopState:
    """The state of a framework's loop, for ``extra``. ``read``: returns it, with the number of "steps" made."""

    read: Callable[[], dict[str, Any]]

    def state_dict(self) -> dict[str, Any]:
        return self.read()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise refused(
            "this snapshot was taken under a framework; give its trainer AttachCallback.checkpoint() in place of "
            "gradcast.resume()"
        )


class FrameworkSnapshots:
    """Takes snapshots. ``folder``: one that all ranks see; None for no snapshots. ``options``: of handle.snapshots."""

    def __init__(self, folder: str | Path | None, options: dict[str, Any]) -> None:
        if options and folder is None:
            raise refused(f"AttachCallback got {', '.join(options)}, but no folder for snapshots; add snapshots=FOLDER")
        self._folder = None if folder is None else store.folder_of(folder)
        self._options = options
        self._given: Whole | None = None  # what the trainer is to go on from

    def checkpoint(self, name: str, write: Callable[[Whole, Path], None]) -> Path | None:
        """The newest snapshot that is whole, in the form that ``write`` gives it, a file or folder ``name`` in its own
        folder; None if there is none. Any process of the training may make it, and the others take it if it is whole.
        Raises Error(invalid_use), OSError."""
        if self._folder is None:
            raise refused("AttachCallback has no folder for snapshots; add snapshots=FOLDER")
        whole = self._given = newest(self._folder)
        if whole is None:
            return None
        if "loop" not in whole.extra:
            raise refused(
                f"the snapshot of step {whole.step} in {self._folder} was taken without a framework; go on from it "
                "with gradcast.resume()"
            )
        folder = store.place_of(self._folder, whole.step) / store.FRAMEWORK
        folder.mkdir(exist_ok=True)
        if folder.is_symlink():
            raise refused(f"{folder} is a link, and gradcast makes a folder of this name; move it elsewhere")
        with _alone(folder / f".{name}.lock"):
            if not _is_whole(folder, name):
                _make(folder, name, lambda place: write(whole, place))
        whole.forget_tensors()
        return folder / name

    @property
    def is_on(self) -> bool:
        return self._folder is not None

    def take(self, handle: gradcast.Handle, module: nn.Module, steps: int, **arguments: Any) -> None:
        """Takes snapshots of a training that begins, or resumes from the result of ``checkpoint``. ``steps``: the
        number that the framework's loop has made. ``arguments``: of handle.snapshots. Collective. Raises
        Error(invalid_use), on every rank, if one does not resume from that result. REQUIRES: ``is_on``."""
        whole, self._given = self._given, None
        if handle.mode == "local":
            raise refused(
                "with local steps every rank has parameters of its own, and a framework's checkpoint has room for one; "
                "omit snapshots=FOLDER, or train without the framework"
            )
        group = TrainingState.of(handle, "snapshots").group
        on_every_rank(group, lambda: self._require_given(whole, steps))
        if len(set(group.gather(whole and whole.step))) > 1:
            raise refused("the ranks go on from different snapshots; call AttachCallback.checkpoint() on every rank")
        if whole is not None:
            is_same = len(whole.ranks) == handle.world_size
            own = whole.ranks[handle.rank if is_same else 0]
            resumed[self._folder] = Resumed(whole.step, own["plan"], damaged=whole.damaged)
            if is_same:
                restore_random_states(own["random"], [module], next(module.parameters()).device)
        handle.snapshots(self._folder, **arguments, **self._options)

    def _require_given(self, whole: Whole | None, steps: int) -> None:
        if whole is not None and steps != whole.extra["loop"]["steps"]:
            raise refused(
                f"the trainer begins at step {steps}, and the snapshot is of its step {whole.extra['loop']['steps']}; "
                "give the trainer AttachCallback.checkpoint() on every rank"
            )
        steps_there = store.complete_steps(self._folder)
        if whole is None and self._folder not in resumed and steps_there:
            raise refused(
                f"{self._folder} holds a snapshot of step {steps_there[-1]}, from which this training does not go on; "
                "give the trainer AttachCallback.checkpoint() on every rank, or name another folder"
            )


def _make(folder: Path, name: str, write: Callable[[Path], None]) -> None:
    new, record = (folder / f".{name}{kind}.{secrets.token_hex(4)}" for kind in ("", ".json"))
    write(new)
    record.write_bytes(sealed({"files": _stored(new)}))
    if _is_whole(folder, name):  # without locks another process may have made it
        _remove(new)
        record.unlink()
    else:
        _remove(folder / name)
        record.rename(_record_of(folder, name))
        new.rename(folder / name)


def _remove(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


def _record_of(folder: Path, name: str) -> Path:
    return folder / f".{name}.json"


def _is_whole(folder: Path, name: str) -> bool:
    """Returns whether the files are as they were made."""
    try:
        fields = parsed(name, _record_of(folder, name).read_bytes())
        return is_sealed(fields) and fields.get("files") == _stored(folder / name)
    except (OSError, DamageError):
        return False


def _stored(place: Path) -> dict[str, list[Any]]:
    """Sizes and hashes of a file, or of those in a folder, by path."""
    files = sorted(place.rglob("*")) if place.is_dir() else [place]
    return {str(each.relative_to(place)): list(stored_in(each)) for each in files if not each.is_dir()}


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Excludes other processes for this file, if its file system has locks. A lock ends with its process."""
    descriptor = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
