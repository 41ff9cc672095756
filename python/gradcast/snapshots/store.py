"""A folder of snapshots in the format of torch.distributed.checkpoint, of which each is complete or not there.

The ranks write their parts into ``step-N.tmp``. When all are on the disk, one of them writes ``.metadata`` and renames
the folder to ``step-N``; hosts that do not share the folder do this each. What a rank writes is planned, and told to
the others, with the first snapshot only.

A part is two files, of objects and of tensors. torch writes both, but takes 0.3 ms of Python for each tensor, in which
training waits. All snapshots' files of tensors differ in the values alone, so that of a later one is the first one's,
with the new values in their places.
"""

import contextlib
import ctypes
import dataclasses
import io
import os
import pickle
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _create_file_view

from gradcast.snapshots.frequency import PlannedStep

Path_ = tuple[str, ...]  # of a value in the nested state dict
PIECE_BYTES = 1 << 20
LONGEST_WAIT_S = 0.2  # of a piece, for the network
_LOOK_S = 0.001
_OWNER = ".training"
_COMPLETE = re.compile(r"step-(\d+)")
_UNFINISHED = re.compile(r"step-(\d+)\.tmp")


def complete_steps(folder: Path) -> list[int]:
    """The steps of the complete snapshots, ascending."""
    return _steps(folder, _COMPLETE, lambda place: (place / ".metadata").is_file())


def unfinished_steps(folder: Path) -> list[int]:
    """The steps of snapshots of which this host has parts, and that it has not made complete, ascending."""
    return _steps(folder, _UNFINISHED, Path.is_dir)


def _steps(folder: Path, pattern: re.Pattern[str], counts: Callable[[Path], bool]) -> list[int]:
    if not folder.is_dir():
        return []
    named = [(entry, pattern.fullmatch(entry.name)) for entry in folder.iterdir()]
    return sorted(int(match[1]) for entry, match in named if match and counts(entry))


def place_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def take_over(folder: Path, name: str) -> None:
    """From now on the folder is that of these snapshots. Raises OSError."""
    new = folder / f"{_OWNER}-{name}"
    new.write_text(name)
    new.replace(folder / _OWNER)  # ranks that look never see half of it


def is_taken_over(folder: Path, name: str) -> bool:
    """Whether other snapshots have come into the folder since ``take_over``."""
    try:
        return (folder / _OWNER).read_text() != name
    except OSError:  # the folder is gone, and comes again with the next snapshot
        return False


def remove_leftovers(folder: Path, beyond: int | None) -> None:
    """Removes parts of snapshots that were never completed, and those of a step ``beyond`` that one, which hosts with
    folders of their own do not all have. Raises OSError. REQUIRES: nobody writes into the folder."""
    complete = complete_steps(folder)
    kept = {place_of(folder, step) for step in complete if beyond is None or step <= beyond}
    for entry in folder.iterdir():
        is_own = _COMPLETE.fullmatch(entry.name) or _UNFINISHED.fullmatch(entry.name)
        if is_own and entry.is_dir() and entry not in kept:
            (entry / ".metadata").unlink(missing_ok=True)
            shutil.rmtree(entry)


@dataclasses.dataclass
class Pace:
    """How fast a part is written. ``bytes_per_s``: at most. ``is_network_busy``: in that time nothing is written, for a
    folder that is reached over the training's network; a piece waits for at most ``LONGEST_WAIT_S``. ``planned``: the
    step that is written beside there, as its plan predicts it."""

    bytes_per_s: float | None = None
    is_network_busy: Callable[[], bool] | None = None
    planned: Callable[[], PlannedStep | None] | None = None

    def await_rate(self, written: int, since_s: float) -> None:
        """Before so many bytes are written ``since_s``, in monotonic time."""
        if self.bytes_per_s is not None:
            time.sleep(max(0.0, since_s + written / self.bytes_per_s - time.monotonic()))

    def await_network(self) -> None:
        """Before the next piece."""
        if self.is_network_busy is not None:
            end_s = time.monotonic() + LONGEST_WAIT_S
            while self.is_network_busy() and time.monotonic() < end_s:
                time.sleep(_LOOK_S)


class _PacedStream:
    """A file that is written in pieces, each in its turn. A piece may hold many small tensors."""

    def __init__(self, file: io.BufferedWriter, pace: Pace) -> None:
        self._file, self._pace, self._since_s, self._written = file, pace, time.monotonic(), 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        start = 0
        while start < len(view):
            in_piece = self._written % PIECE_BYTES
            part = view[start : start + PIECE_BYTES - in_piece]
            if in_piece == 0:
                self._pace.await_network()
            start, self._written = start + len(part), self._written + len(part)
            self._pace.await_rate(self._written, self._since_s)
            self._file.write(part)
            # Otherwise the system sends it when it likes.
            if self._pace.is_network_busy is not None and self._written % PIECE_BYTES == 0:
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
        # What small tensors are gathered in: whenever a piece goes to the system, training may take the GIL.
        with Path(path).open(mode, buffering=PIECE_BYTES) as file:
            yield file if self._pace == Pace() else _PacedStream(file, self._pace)


class _FileOfTensors:
    """A file that torch has written, to write it again with other values. Each tensor is an archive in it, which torch
    reads without a look at its checksums."""

    def __init__(self, file: Path, written: Sequence[WriteResult], tensors: Mapping[str, torch.Tensor]) -> None:
        self._name = file.name
        self._pieces: list[tuple[bytes, str]] = []  # what stands before a tensor's values, and its key
        position = 0
        with file.open("rb") as stream:
            for each in sorted(written, key=lambda each: each.storage_data.offset):
                stored, key = each.storage_data, each.index.fqn
                archive = torch._C.PyTorchFileReader(_create_file_view(stream, stored.offset, stored.length))
                values = stored.offset + archive.get_record_offset("data/0")
                stream.seek(position)
                self._pieces.append((stream.read(values - position), key))
                position = values + tensors[key].nbytes
            stream.seek(position)
            self._end = stream.read()

    def write(self, folder: Path, tensors: Mapping[str, torch.Tensor], pace: Pace) -> None:
        """Raises OSError."""
        with _PacedFiles(pace).create_stream(folder / self._name, "wb") as stream:
            for before, key in self._pieces:
                stream.write(before)
                stream.write(_bytes_of(tensors[key]))
            stream.write(self._end)
            stream.flush()
            os.fsync(stream.fileno())


@dataclasses.dataclass
class Layout:
    """What all snapshots of a training share, made with the first one. ``own``: by key, shape and dtype of what this
    rank writes; ``items``, ``tensors``, ``paths``: of all ranks, where snapshots are completed."""

    own: dict[str, Any] = dataclasses.field(default_factory=dict)
    objects_plan: SavePlan | None = None
    file: _FileOfTensors | None = None
    items: dict[int, list[WriteItem]] = dataclasses.field(default_factory=dict)
    tensors: dict[int, Sequence[WriteResult]] = dataclasses.field(default_factory=dict)
    paths: dict[int, list[Path_]] = dataclasses.field(default_factory=dict)
    _metadata: Metadata | None = None

    def take_in(self, parts: list[bytes]) -> list[Any]:
        """``parts``: what each rank's write_part has returned, b"" of one that has failed. Returns what was written."""
        found = []
        for rank, part in enumerate(parts):
            new, objects = pickle.loads(part) if part else (None, [])
            if new is not None:
                self.items[rank], self.tensors[rank], self.paths[rank] = new
                self._metadata = None
            found.append([*objects, *self.tensors.get(rank, ())])
        return found

    def metadata(self, paths: list[Path_]) -> Metadata:
        """``paths``: of values that may not be missing, in their order."""
        if self._metadata is None:
            plans = [SavePlan(items) for _, items in sorted(self.items.items())]
            known = {_key(path): path for own in self.paths.values() for path in own}
            known = {_key(path): path for path in paths if _key(path) in known} | known
            self._metadata = dataclasses.replace(create_default_global_save_plan(plans)[1], planner_data=known)
        if lacking := next((path for path in paths if _key(path) not in self._metadata.planner_data), None):
            raise RuntimeError(f"no rank has written {_key(lacking)}")
        return self._metadata


class Writing:
    """One snapshot on its way to the disk."""

    def __init__(self, folder: Path, step: int, rank: int, layout: Layout, pace: Pace) -> None:
        self._folder, self._place, self._rank = folder, place_of(folder, step), rank
        self._unfinished = self._place.with_suffix(".tmp")
        self._layout, self._pace = layout, pace

    def write_part(self, own: Mapping[Path_, Any]) -> bytes:
        """Writes this rank's values, dense tensors in host memory or picklable objects, and syncs them to the
        disk. Returns what ``complete`` needs to know. Raises OSError."""
        self._unfinished.mkdir(parents=True, exist_ok=True)
        layout = self._layout
        writer, planner = FileSystemWriter(self._unfinished), DefaultSavePlanner()
        writer.fs = _PacedFiles(self._pace)
        flat = {_key(path): value for path, value in own.items()}
        planner.set_up_planner(flat)
        kinds = {k: (v.shape, v.dtype) if isinstance(v, torch.Tensor) else None for k, v in flat.items()}
        if kinds == layout.own:
            if layout.file is not None:
                layout.file.write(self._unfinished, flat, self._pace)
            return pickle.dumps((None, writer.write_data(layout.objects_plan, planner).value()))
        items = create_default_local_save_plan(flat, False).items
        objects = [item for item in items if item.type == WriteItemType.BYTE_IO]
        tensors = [item for item in items if item.type != WriteItemType.BYTE_IO]
        # This numbers the files by the plans.
        plans = writer.prepare_global_plan([SavePlan([])] * (2 * self._rank) + [SavePlan(objects), SavePlan(tensors)])
        of_objects = writer.write_data(plans[-2], planner).value()
        of_tensors = writer.write_data(plans[-1], planner).value() if tensors else []
        file = self._unfinished / of_tensors[0].storage_data.relative_path if of_tensors else None
        layout.file = None if file is None else _FileOfTensors(file, of_tensors, flat)
        layout.own, layout.objects_plan = kinds, plans[-2]  # nothing has failed, so that the others learn of it
        return pickle.dumps(((items, of_tensors, list(own)), of_objects))

    def complete(self, results: list[Any], paths: list[Path_]) -> None:
        """Makes the snapshot a complete one. ``results``: of all ranks, from Layout.take_in. ``paths``: see
        Layout.metadata. Raises OSError."""
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
        self.place = place
        self._prefix: Path_ = ()

    def enter(self, prefix: Path_) -> None:
        """From now on the paths of tensors, those of ``contents``, too, are what follows this one."""
        count, self._prefix = len(prefix), prefix
        self.contents = {path[count:]: each for path, each in self.contents.items() if path[:count] == prefix}

    def missing(self, paths: Iterable[Path_]) -> list[str]:
        """The names of files with values of these paths that are not there, or cut off."""
        sizes: dict[str, int] = {}
        keys = {_key(path) for path in paths}
        for index, stored in self._metadata.storage_data.items():
            if index.fqn in keys:
                name = stored.relative_path
                sizes[name] = max(sizes.get(name, 0), stored.offset + stored.length)
        return [name for name, size in sorted(sizes.items()) if _size_of(self.place / name) < size]

    def tensors(self, paths: Iterable[Path_]) -> dict[Path_, torch.Tensor]:
        """Reads these, into host memory."""
        found = {path: torch.empty(size, dtype=dtype) for path in paths for size, dtype in [self.contents[path]]}
        self._read({_key((*self._prefix, *path)): tensor for path, tensor in found.items()})
        return found

    def object(self, path: Path_) -> Any:
        state = {_key(path): None}
        self._read(state)
        return state[_key(path)]

    def _read(self, state: dict[str, Any]) -> None:
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(state, self._metadata, True)
        self._reader.read_data(planner.create_local_plan(), planner)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a dense tensor on the host."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


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
