"""Writes snapshots in the format of torch.distributed.checkpoint, beside files of gradcast's own.

The form of each rank's part is planned, and sent to the others, with the first snapshot only. Each part is a file of
tensors and one of objects. torch writes the first file of tensors, but takes 0.3 ms of Python for each tensor, in which
training waits. A later one is the first one's, with the new values and their checksums in its places.
"""

import contextlib
import dataclasses
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _create_file_view

from gradcast.snapshots import store
from gradcast.snapshots.files import Files, Pace, Stored, bytes_of, sealed
from gradcast.snapshots.store import Path_

# In a zip archive: what an entry begins with, and where its checksum is: in its header, or in a descriptor behind the
# values, and in the directory.
_HEADER = b"PK\3\4"
_FLAGS, _HEADER_CRC, _NAME_LENGTH, _NAME = 6, 14, 26, 30
_HAS_DESCRIPTOR, _DESCRIPTOR_CRC = 8, 4
_DIRECTORY_CRC, _DIRECTORY_NAME = 16, 46


class _Archive(NamedTuple):
    """A tensor's zip archive in a file: what stands before and behind its values, and the checksums of these there."""

    key: str
    before: bytearray
    behind: bytearray
    checksums: list[tuple[bytearray, int]]


class _FileOfTensors:
    """A file that torch has written, to write it again with other values."""

    def __init__(self, file: Path, written: Sequence[WriteResult], tensors: Mapping[str, torch.Tensor]) -> None:
        self._name = file.name
        self._archives: list[_Archive] = []
        self.offsets: dict[str, int] = {}  # of the values, by key
        position = 0
        with file.open("rb") as stream:
            for each in sorted(written, key=lambda each: each.storage_data.offset):
                begin, length, key = each.storage_data.offset, each.storage_data.length, each.index.fqn
                # torch's stubs lack what it reads.
                reader: Any = torch._C.PyTorchFileReader(cast(IO[bytes], _create_file_view(stream, begin, length)))
                values = self.offsets[key] = begin + reader.get_record_offset("data/0")
                stream.seek(position)
                before = bytearray(stream.read(values - position))
                stream.seek(values + tensors[key].nbytes)
                position = begin + length
                behind = bytearray(stream.read(position - stream.tell()))
                checksums = _checksums(before, behind, zlib.crc32(bytes_of(tensors[key])))
                self._archives.append(_Archive(key, before, behind, checksums))

    def write(self, folder: Path, tensors: Mapping[str, torch.Tensor], files: Files) -> None:
        """Writes the file. Raises OSError."""
        with files.create_stream(folder / self._name, "wb") as stream:
            for key, before, behind, checksums in self._archives:
                values = bytes_of(tensors[key])
                checksum = zlib.crc32(values)
                for part, place in checksums:
                    struct.pack_into("<I", part, place, checksum)
                for piece in (before, values, behind):
                    stream.write(piece)


def _checksums(before: bytearray, behind: bytearray, checksum: int) -> list[tuple[bytearray, int]]:
    """The places of the checksum of the values between."""
    header = before.rindex(_HEADER)
    flags, length = (struct.unpack_from("<H", before, header + each)[0] for each in (_FLAGS, _NAME_LENGTH))
    name = before[header + _NAME : header + _NAME + length]
    found = [(behind, behind.index(name) - _DIRECTORY_NAME + _DIRECTORY_CRC)]
    found.append((behind, _DESCRIPTOR_CRC) if flags & _HAS_DESCRIPTOR else (before, header + _HEADER_CRC))
    if any(struct.unpack_from("<I", part, place)[0] != checksum for part, place in found):
        raise RuntimeError("torch writes archives in a form that gradcast does not know; tell gradcast of this version")
    return found


# Of one rank: torch's plan and results, and by tensor what LAYOUT holds.
_OwnLayout = tuple[list[WriteItem], list[WriteResult], list[dict[str, Any]]]


class Part(NamedTuple):
    """A rank's files of a snapshot. ``new``: its layout, where that has changed."""

    stored: dict[str, Stored]
    new: _OwnLayout | None


@dataclasses.dataclass
class Layout:
    """The form of all snapshots of a training, made with the first one. ``own``: by key, shape and dtype of this rank's
    tensors; ``parts``: of all ranks, where snapshots are completed."""

    own: dict[str, Any] = dataclasses.field(default_factory=dict)
    file: _FileOfTensors | None = None
    parts: dict[int, _OwnLayout] = dataclasses.field(default_factory=dict)
    _metadata: Metadata | None = None
    text: bytes = b""  # of LAYOUT

    def take_in(self, parts: Sequence[Part | None]) -> None:
        """``parts``: the results of write_part by rank, None for a rank that has failed."""
        for rank, part in enumerate(parts):
            if part is not None and part.new is not None:
                self.parts[rank] = part.new
                self._metadata = None

    def metadata(self, paths: list[Path_]) -> Metadata:
        """Torch's metadata. ``paths``: of tensors that may not be missing, in their order."""
        if self._metadata is None:
            tensors = [each for _, _, own in self.parts.values() for each in own]
            known = {_key(each["path"]): tuple(each["path"]) for each in tensors}
            known = {_key(path): path for path in paths if _key(path) in known} | known
            plans = [SavePlan(items) for _, (items, _, _) in sorted(self.parts.items())]
            self._metadata = dataclasses.replace(create_default_global_save_plan(plans)[1], planner_data=known)
            by_key = {_key(each["path"]): each for each in tensors}
            self.text = json.dumps({"tensors": [by_key[key] for key in known]}).encode()
        if lacking := next((path for path in paths if _key(path) not in self._metadata.planner_data), None):
            raise RuntimeError(f"no rank has written {_key(lacking)}")
        return self._metadata


class Writing:
    """One snapshot on its way to the disk."""

    def __init__(self, folder: Path, step: int, rank: int, layout: Layout, pace: Pace) -> None:
        self._place, self._step, self._rank = store.place_of(folder, step), step, rank
        self._layout, self._files = layout, Files(store.unfinished_of(self._place), pace)

    def write_part(self, tensors: Mapping[Path_, torch.Tensor], objects: Mapping[str, bytes]) -> Part:
        """Writes this rank's tensors, contiguous and in host memory, and files of objects by name, and syncs them to
        the disk. Raises OSError."""
        folder = store.begin(self._place)
        for name, data in objects.items():
            self._files.write(name, data)
        layout, flat = self._layout, {_key(path): tensor for path, tensor in tensors.items()}
        kinds = {key: (tensor.shape, tensor.dtype) for key, tensor in flat.items()}
        if kinds == layout.own:
            if layout.file is not None:
                layout.file.write(folder, flat, self._files)
            self._files.sync()
            return Part(self._files.stored, None)
        writer, planner = self._writer(folder), DefaultSavePlanner()
        planner.set_up_planner(flat)
        items = create_default_local_save_plan(flat, False).items
        # This numbers the files by the plans.
        plan = writer.prepare_global_plan([SavePlan([])] * self._rank + [SavePlan(items)])[-1]
        written = writer.write_data(plan, planner).value() if items else []
        layout.file = _FileOfTensors(folder / written[0].storage_data.relative_path, written, flat) if items else None
        self._files.sync()
        offsets = layout.file.offsets if layout.file is not None else {}
        layout.own = kinds  # nothing has failed, so that the others learn of it
        own = [
            {
                "path": list(path),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "file": written[0].storage_data.relative_path,
                "offset": offsets[_key(path)],
            }
            for path, tensor in tensors.items()
        ]
        return Part(self._files.stored, (items, written, own))

    def complete(self, parts: Sequence[Part], paths: list[Path_], **fields: Any) -> None:
        """Makes the snapshot a complete one. ``parts``: of all ranks, after Layout.take_in. ``paths``: see
        Layout.metadata. ``fields``: more of METADATA. Raises OSError."""
        folder, layout = store.unfinished_of(self._place), self._layout
        self._writer(folder).finish(layout.metadata(paths), [written for _, written, _ in layout.parts.values()])
        self._files.write(store.LAYOUT, layout.text)
        stored = self._files.stored | {name: each for part in parts for name, each in part.stored.items()}
        files = {name: each._asdict() for name, each in sorted(stored.items())}
        own = {"format": store.FORMAT, "version": store.VERSION, "step": self._step} | fields | {"files": files}
        self._files.write(store.METADATA, sealed(own))
        self._files.sync()
        store.complete(self._place)

    def abandon(self) -> None:
        unfinished = store.unfinished_of(self._place)
        with contextlib.suppress(OSError):
            if store.is_own(unfinished):
                store.remove(unfinished)

    def _writer(self, folder: Path) -> FileSystemWriter:
        writer = FileSystemWriter(folder, sync_files=False)
        writer.fs = self._files
        return writer


def _key(path: Sequence[str]) -> str:
    return ".".join(path)
