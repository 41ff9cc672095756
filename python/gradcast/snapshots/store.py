"""A folder of snapshots in the format of torch.distributed.checkpoint, of which each is complete or not there.

The ranks write their parts into ``step-N.tmp``. When all are on the disk, rank 0 writes ``.metadata`` and renames the
folder to ``step-N``. What is to be written follows from names and shapes, which all ranks have: no plan is sent.
"""

import dataclasses
import os
import pickle
import re
import shutil
from collections.abc import Mapping
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
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

Path_ = tuple[str, ...]  # of a value in the nested state dict
_COMPLETE = re.compile(r"step-(\d+)")


def complete_steps(folder: Path) -> list[int]:
    """The steps of the complete snapshots, ascending."""
    if not folder.is_dir():
        return []
    named = [(entry, _COMPLETE.fullmatch(entry.name)) for entry in folder.iterdir()]
    return sorted(int(match[1]) for entry, match in named if match and (entry / ".metadata").is_file())


def place_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def remove_leftovers(folder: Path) -> None:
    """Removes parts of snapshots that were never completed. REQUIRES: nobody writes into the folder."""
    for entry in folder.glob("step-*"):
        if not (entry / ".metadata").is_file() or entry.suffix == ".tmp":
            shutil.rmtree(entry)


class Writing:
    """One snapshot on its way to the disk."""

    def __init__(self, folder: Path, step: int, rank: int) -> None:
        self._folder, self._place, self._rank = folder, place_of(folder, step), rank
        self._unfinished = self._place.with_suffix(".tmp")

    def write_part(self, own: Mapping[Path_, Any]) -> bytes:
        """Writes this rank's values, tensors in host memory or picklable objects, and syncs them to the disk. Returns
        what ``complete`` needs to know. Raises OSError."""
        self._unfinished.mkdir(parents=True, exist_ok=True)
        writer, planner = FileSystemWriter(self._unfinished), DefaultSavePlanner()
        flat = {_key(path): value for path, value in own.items()}
        planner.set_up_planner(flat)
        plan = create_default_local_save_plan(flat, False)
        plans = writer.prepare_global_plan([SavePlan([])] * self._rank + [plan])  # numbers the files by rank
        return pickle.dumps((plan.items, writer.write_data(plans[-1], planner).value()))

    def complete(self, parts: list[bytes], paths: list[Path_]) -> None:
        """Makes the snapshot a complete one. Rank 0 only. ``parts``: what each rank's write_part has returned.
        ``paths``: of all values. Raises OSError."""
        written = [pickle.loads(part) for part in parts]
        _, metadata = create_default_global_save_plan([SavePlan(items) for items, _ in written])
        metadata = dataclasses.replace(metadata, planner_data={_key(path): path for path in paths})
        FileSystemWriter(self._unfinished).finish(metadata, [results for _, results in written])
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


def _key(path: Path_) -> str:
    return ".".join(path)


def _sync(folder: Path) -> None:
    """Puts the folder's entries on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
