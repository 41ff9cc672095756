"""Reads a snapshot into host memory. Everything that is used has the hash that was written with it.

Files of objects are unpickled with ``weights_only``, and nothing else. PyTorch's own file (``.metadata``) is only
compared with its hash.
"""

import hashlib
import io
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gradcast.errors import refused
from gradcast.snapshots import store
from gradcast.snapshots.files import (
    PIECE_BYTES,
    DamageError,
    Stored,
    bytes_of,
    is_sealed,
    parsed,
    require_fields,
    require_stored,
    stored_in,
)
from gradcast.snapshots.plain import from_bytes, others_in
from gradcast.snapshots.store import Path_

_DTYPES = {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


class _Values(NamedTuple):
    """The place of a tensor's values in a file."""

    offset: int
    path: Path_
    shape: tuple[int, ...]
    dtype: torch.dtype


class Reading:
    """One complete snapshot. ``files``: all, by name. ``paths``: of all tensors, in the model's order. ``tensors``: by
    path, those of the files that ``load`` has read. ``step``, ``world_size``, ``is_local``: of the training."""

    def __init__(self, place: Path) -> None:
        """Raises DamageError, OSError, and Error(invalid_use) for another version."""
        self.place, self.paths, self.tensors = place, list[Path_](), dict[Path_, torch.Tensor]()
        fields = _metadata(place)
        self.step: int = fields["step"]
        self.world_size: int = fields["world_size"]
        self.is_local: bool = fields["is_local"]
        self.files = {name: Stored(each["bytes"], each["sha256"]) for name, each in fields["files"].items()}
        objects = [store.file_of(rank) for rank in range(self.world_size)] + [store.COMMON] * (not self.is_local)
        for name in (store.LAYOUT, store.OF_TORCH, *objects):
            if name not in self.files:
                raise DamageError(f"{store.METADATA}: files: {name} is missing")
        self._bytes: dict[str, bytes | bytearray] = {}  # of files of objects
        self.values: dict[str, list[_Values]] = {name: [] for name in self.files}
        self._load(store.LAYOUT)
        layout = parsed(store.LAYOUT, self._bytes[store.LAYOUT])
        require_fields(store.LAYOUT, layout, tensors=list)
        for number, each in enumerate(layout["tensors"]):
            self._take_in(f"{store.LAYOUT}: tensors[{number}]", each)

    def _take_in(self, where: str, fields: Any) -> None:
        require_fields(where, fields, path=list, dtype=str, shape=list, file=str, offset=int)
        path, dtype, shape = fields["path"], _DTYPES.get(fields["dtype"]), fields["shape"]
        file, offset = self.files.get(fields["file"]), fields["offset"]
        if not path or not all(isinstance(each, str) for each in path):
            raise DamageError(f"{where}: path is {path}")
        if dtype is None or file is None:
            raise DamageError(f"{where}: dtype is {fields['dtype']}, file is {fields['file']}")
        if not all(isinstance(each, int) and each >= 0 for each in shape):
            raise DamageError(f"{where}: shape is {shape}")
        if offset < 0 or offset + math.prod(shape) * dtype.itemsize > file.bytes:
            raise DamageError(f"{where}: values at {offset} do not fit into {fields['file']}")
        self.paths.append(tuple(path))
        self.values[fields["file"]].append(_Values(offset, tuple(path), tuple(shape), dtype))

    def needed_by(self, rank: int) -> list[str]:
        """The files that this rank has to read: with local steps, of other ranks' states none."""
        if not self.is_local:
            return list(self.files)
        number = rank % self.world_size
        prefix = store.local_path(number)
        own = [name for name, values in self.values.items() if any(each.path[:2] == prefix for each in values)]
        return [store.LAYOUT, store.OF_TORCH, store.file_of(number), *own]

    def load(self, names: Iterable[str]) -> dict[str, str]:
        """Reads these files, where that has not been done. Returns by name what is wrong with those that are not
        whole."""
        found = {}
        for name in names:
            try:
                if name not in self._bytes:
                    self._load(name)
            except (DamageError, OSError) as error:
                found[name] = str(error) if name in str(error) else f"{name}: {error}"
        return found

    def is_whole(self, name: str) -> bool:
        """Returns whether this host has the file as it was written."""
        try:
            return name in self._bytes or stored_in(self.place / name) == self.files[name]
        except OSError:
            return False

    def object(self, name: str) -> Any:
        """The object in a file that has been read. Raises Error(invalid_use) for more than plain data."""
        data, others = self._bytes[name], []
        try:
            if not (others := others_in(data)):
                return from_bytes(data)
        except Exception as error:  # of what gradcast has not written: anything
            raise refused(f"{self.place / name} cannot be read ({type(error).__name__}: {error})") from None
        raise refused(
            f"{self.place / name} holds {', '.join(others)}, and reading more than plain data can run code; if the "
            "snapshot is yours, allow it with torch.serialization.add_safe_globals([...]) before gradcast.resume()"
        )

    def enter(self, prefix: Path_) -> None:
        """Keeps the tensors whose paths begin with ``prefix``, and removes it from the paths."""
        count = len(prefix)
        self.paths = [path[count:] for path in self.paths if path[:count] == prefix]
        self.tensors = {path[count:]: each for path, each in self.tensors.items() if path[:count] == prefix}

    def _load(self, name: str) -> None:
        """Reads the file once, with the tensors in it into memory of their own."""
        expected, found, tensors = self.files[name], hashlib.sha256(), {}
        with (self.place / name).open("rb") as stream:
            require_stored(name, expected._replace(bytes=os.fstat(stream.fileno()).st_size), expected)
            for offset, path, shape, dtype in sorted(self.values[name], key=lambda each: each.offset):
                if offset < stream.tell():
                    raise DamageError(f"{store.LAYOUT}: {'.'.join(path)} overlaps another tensor in {name}")
                _read_into(stream, memoryview(bytearray(offset - stream.tell())), found)
                tensors[path] = torch.empty(shape, dtype=dtype)
                _read_into(stream, bytes_of(tensors[path]), found)
            rest = bytearray(expected.bytes - stream.tell())
            _read_into(stream, memoryview(rest), found)
        require_stored(name, Stored(expected.bytes, found.hexdigest()), expected)
        self._bytes[name] = b"" if tensors else rest
        self.tensors |= tensors


def _read_into(stream: io.BufferedReader, view: memoryview, found: Any) -> None:
    for start in range(0, len(view), PIECE_BYTES):
        part = view[start : start + PIECE_BYTES]
        stream.readinto(part)
        found.update(part)


def _metadata(place: Path) -> dict[str, Any]:
    """The fields of METADATA. Raises as Reading does."""
    name = store.METADATA
    fields = parsed(name, (place / name).read_bytes())
    if (fields.get("format"), fields.get("version")) != (store.FORMAT, store.VERSION) and is_sealed(fields):
        raise refused(
            f"{place / name} is of the format {fields.get('format')!r} in version {fields.get('version')!r}, and this "
            f"gradcast reads version {store.VERSION}; go on with the gradcast that wrote it, or name another folder"
        )
    require_fields(name, fields, format=str, version=int, step=int, world_size=int, is_local=bool, files=dict)
    if not 0 < fields["world_size"] <= len(fields["files"]):
        raise DamageError(f"{name}: world_size is {fields['world_size']}")
    for file, each in fields["files"].items():
        require_fields(f"{name}: files: {file}", each, bytes=int, sha256=str)
        if not store.is_file_name(file):
            raise DamageError(f"{name}: files: {file} is no file of a snapshot")
    if not is_sealed(fields):
        raise DamageError(f"{name} has other bytes than were written")
    if place != store.place_of(place.parent, fields["step"]):
        raise DamageError(f"{name}: step is {fields['step']}")
    return fields
