"""A folder of snapshots in the format of torch.distributed.checkpoint, of which each is complete or not there.

The ranks write their parts into ``step-N.tmp``. When all are on the disk, one of them writes ``.metadata`` and renames
the folder to ``step-N``; hosts that do not share the folder do this each. What a rank writes is planned, and told to
the others, with the first snapshot only.
"""

import contextlib
import dataclasses
import io
import os
import pickle
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

Path_ = tuple[str, ...]  # of a value in the nested state dict
_PIECE_BYTES = 1 << 20
_LONGEST_WAIT_S = 0.2  # of a piece, for the network
_LOOK_S = 0.001
_OWN = re.compile(r"step-\d+(\.tmp)?")
_COMPLETE = re.compile(r"step-(\d+)")


def complete_steps(folder: Path) -> list[int]:
    """The steps of the complete snapshots, ascending."""
    if not folder.is_dir():
        return []
    named = [(entry, _COMPLETE.fullmatch(entry.name)) for entry in folder.iterdir()]
    return sorted(int(match[1]) for entry, match in named if match and (entry / ".metadata").is_file())


def place_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def remove_leftovers(folder: Path, beyond: int | None) -> None:
    """Removes parts of snapshots that were never completed, and those of a step ``beyond`` that one, which hosts with
    folders of their own do not all have. Raises OSError. REQUIRES: nobody writes into the folder."""
    complete = complete_steps(folder)
    kept = {place_of(folder, step) for step in complete if beyond is None or step <= beyond}
    for entry in folder.iterdir():
        if _OWN.fullmatch(entry.name) and entry.is_dir() and entry not in kept:
            (entry / ".metadata").unlink(missing_ok=True)
            shutil.rmtree(entry)


@dataclasses.dataclass
class Pace:
    """How fast a part is written. ``bytes_per_s``: at most. ``is_network_busy``: in that time nothing is written, for a
    folder that is reached over the training's network; a piece waits for at most ``_LONGEST_WAIT_S``."""

    bytes_per_s: float | None = None
    is_network_busy: Callable[[], bool] | None = None

    def await_turn(self, size: int, since_s: float, written: int) -> None:
        """Before the next piece, of ``size`` bytes. ``written``: bytes since ``since_s``, in monotonic time."""
        if self.bytes_per_s is not None:
            time.sleep(max(0.0, since_s + (written + size) / self.bytes_per_s - time.monotonic()))
        if self.is_network_busy is not None:
            end_s = time.monotonic() + _LONGEST_WAIT_S
            while self.is_network_busy() and time.monotonic() < end_s:
                time.sleep(_LOOK_S)


class _PacedStream:
    """A file that is written in pieces, each in its turn."""

    def __init__(self, file: io.BufferedWriter, pace: Pace) -> None:
        self._file, self._pace, self._since_s, self._written = file, pace, time.monotonic(), 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            self._pace.await_turn(len(piece), self._since_s, self._written)
            self._file.write(piece)
            self._written += len(piece)
            if self._pace.is_network_busy is not None:  # otherwise the system sends it when it likes
                self._file.flush()
                os.fdatasync(self._file.fileno())
        return len(view)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _PacedFiles(FileSystem):
    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace = pace

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as file:
            yield _PacedStream(file, self._pace)


@dataclasses.dataclass
class Layout:
    """What all snapshots of a training share, made with the first one. ``own``: by path, shape and dtype of what this
    rank writes; ``items``: of all ranks, where snapshots are completed."""

    own: dict[str, Any] = dataclasses.field(default_factory=dict)
    plan: SavePlan | None = None
    items: dict[int, list[WriteItem]] = dataclasses.field(default_factory=dict)
    _metadata: Metadata | None = None

    def take_in(self, parts: list[bytes]) -> list[Any]:
        """``parts``: what each rank's write_part has returned, b"" of one that has failed. Returns what was written."""
        written = [pickle.loads(part) if part else (None, []) for part in parts]
        new = {rank: items for rank, (items, _) in enumerate(written) if items is not None}
        self.items |= new
        self._metadata = None if new else self._metadata
        return [results for _, results in written]

    def metadata(self, paths: list[Path_]) -> Metadata:
        """``paths``: of all values."""
        if self._metadata is None:
            plans = [SavePlan(items) for _, items in sorted(self.items.items())]
            self._metadata = create_default_global_save_plan(plans)[1]
        return dataclasses.replace(self._metadata, planner_data={_key(path): path for path in paths})


class Writing:
    """One snapshot on its way to the disk."""

    def __init__(self, folder: Path, step: int, rank: int, layout: Layout, pace: Pace) -> None:
        self._folder, self._place, self._rank = folder, place_of(folder, step), rank
        self._unfinished = self._place.with_suffix(".tmp")
        self._layout, self._pace = layout, pace

    def write_part(self, own: Mapping[Path_, Any]) -> bytes:
        """Writes this rank's values, tensors in host memory or picklable objects, and syncs them to the disk. Returns
        what ``complete`` needs to know. Raises OSError."""
        self._unfinished.mkdir(parents=True, exist_ok=True)
        writer, planner = FileSystemWriter(self._unfinished), DefaultSavePlanner()
        if self._pace != Pace():
            writer.fs = _PacedFiles(self._pace)
        flat = {_key(path): value for path, value in own.items()}
        planner.set_up_planner(flat)
        kinds = {k: (v.shape, v.dtype) if isinstance(v, torch.Tensor) else None for k, v in flat.items()}
        is_known = kinds == self._layout.own
        plan = self._layout.plan if is_known else create_default_local_save_plan(flat, False)
        plans = writer.prepare_global_plan([SavePlan([])] * self._rank + [plan])  # numbers the files by rank
        results = writer.write_data(plans[-1], planner).value()
        self._layout.own, self._layout.plan = kinds, plan
        return pickle.dumps((None if is_known else plan.items, results))

    def complete(self, results: list[Any], paths: list[Path_]) -> None:
        """Makes the snapshot a complete one. ``results``: of all ranks, from Layout.take_in. ``paths``: of all values.
        Raises OSError."""
        FileSystemWriter(self._unfinished).finish(self._layout.metadata(paths), results)
        _sync(self._unfinished)
        self._unfinished.rename(self._place)
        _sync(self._folder)

    def abandon(self) -> None:
        shutil.rmtree(self._unfinished, ignore_errors=True)


def keep_newest(folder: Path, count: int) -> None:
    """Removes all complete snapshots but the newest ones. Raises OSError."""
    for step in complete_steps(folder)[:-count]:
        # Without its metadata a snapshot is not there, so that none is ever half deleted.
        (place_of(folder, step) / ".metadata").unlink()
        shutil.rmtree(place_of(folder, step))


class Reading:
    """One complete snapshot."""

    def __init__(self, place: Path) -> None:
        self._reader = FileSystemReader(place)
        self._metadata: Metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, True)
        # By path: shape and dtype of a tensor, None of an object.
        self.contents: dict[Path_, tuple[torch.Size, torch.dtype] | None] = {}
        for key, path in self._metadata.planner_data.items():
            stored = self._metadata.state_dict_metadata[key]
            is_tensor = hasattr(stored, "properties")
            self.contents[tuple(path)] = (stored.size, stored.properties.dtype) if is_tensor else None
        self._place = place

    def missing(self) -> list[str]:
        """The names of files that are not there, or cut off."""
        sizes: dict[str, int] = {}
        for stored in self._metadata.storage_data.values():
            name = stored.relative_path
            sizes[name] = max(sizes.get(name, 0), stored.offset + stored.length)
        return [name for name, size in sorted(sizes.items()) if _size_of(self._place / name) < size]

    def piece(self, name: str, offset: int, size: int) -> bytes:
        """Of a file, at most ``size`` bytes; none behind its end. Raises OSError."""
        with (self._place / name).open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def new_part(self, name: str) -> "NewPart":
        return NewPart(self._place / name)

    def read(self, into: dict[Path_, torch.Tensor]) -> None:
        """Reads values into these tensors of the same shapes."""
        self._read({_key(path): tensor for path, tensor in into.items()})

    def object(self, path: Path_) -> Any:
        state = {_key(path): None}
        self._read(state)
        return state[_key(path)]

    def _read(self, state: dict[str, Any]) -> None:
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(state, self._metadata, True)
        self._reader.read_data(planner.create_local_plan(), planner)


class NewPart:
    """A file of a snapshot that comes in pieces. Ranks of a host may write the same one at once. Raises OSError."""

    def __init__(self, place: Path) -> None:
        self._place, self._new = place, place.with_name(f"{place.name}.{os.getpid()}")
        self._mode = "wb"

    def add(self, piece: bytes) -> None:
        with self._new.open(self._mode) as file:
            file.write(piece)
        self._mode = "ab"

    def replace(self) -> None:
        """It is whole, and takes its place."""
        self._new.replace(self._place)


def _key(path: Path_) -> str:
    return ".".join(path)


def _size_of(file: Path) -> int:
    """In bytes; -1 if there is none."""
    try:
        return file.stat().st_size
    except OSError:
        return -1


def _sync(folder: Path) -> None:
    """Puts the folder's entries on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
