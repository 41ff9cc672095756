"""A folder of snapshots, beside files of others. Only what has gradcast's mark in it is ever removed or moved.

The ranks write their parts into ``step-N.tmp``. When all are on the disk, one of them writes ``gradcast.json`` and
renames the folder to ``step-N``; hosts that do not share the folder do this each.
"""

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from gradcast.errors import refused
from gradcast.snapshots.files import sync

MARK = ".gradcast"  # in a folder of snapshots, names those that write there; in a snapshot, says that it is one
METADATA = "gradcast.json"  # of a complete snapshot
LAYOUT = "tensors.json"
COMMON = "common.pt"
OF_TORCH = ".metadata"
FORMAT, VERSION = "gradcast snapshot", 3  # in METADATA
FRAMEWORK = "framework"  # the folder of what frameworks go on from
_OWNED_BY = "gradcast snapshots "
_COMPLETE = re.compile(r"step-(0|[1-9][0-9]*)")
_UNFINISHED = re.compile(r"step-(0|[1-9][0-9]*)\.tmp")
_OWN = re.compile(
    r"(gradcast\.json|tensors\.json|common\.pt|rank-[0-9]+\.pt|__[0-9]+_0\.distcp|\.metadata(\.tmp)?)(\.[0-9a-f]{8})?"
)


Path_ = tuple[str, ...]  # of a tensor in the nested state dict


class Listing(NamedTuple):
    """Steps, ascending. ``unfinished``: those of which this host has only parts. ``others``: names like a snapshot's of
    files that are none."""

    complete: list[int]
    unfinished: list[int]
    others: list[str]


def folder_of(path: object) -> Path:
    """The folder of snapshots that the program names. Raises Error(invalid_use) for what cannot be one."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path) or "\0" in str(path):
        raise refused(f"the folder of snapshots is {path!r}; give the path of a folder")
    path = Path(path)
    try:
        for each in (path, *path.parents):
            if each.is_symlink() and not each.exists():
                raise refused(
                    f"{each} is a link to {each.readlink()}, which does not exist; mount or make that, or name another "
                    "folder for snapshots"
                )
            if each.exists() and not each.is_dir():
                raise refused(f"{each} is a file; name a folder for snapshots")
        return path.resolve()
    except OSError as error:
        raise refused(f"the folder of snapshots {path} cannot be read ({error}); name another one") from None


def listed(folder: Path) -> Listing:
    """Raises OSError."""
    found = Listing([], [], [])
    for entry in folder.iterdir() if folder.exists() else ():
        complete, unfinished = _COMPLETE.fullmatch(entry.name), _UNFINISHED.fullmatch(entry.name)
        if (complete or unfinished) and not is_own(entry):
            if not _is_empty(entry):
                found.others.append(entry.name)
        elif complete and os.path.lexists(entry / METADATA):
            found.complete.append(int(complete[1]))
        elif unfinished:
            found.unfinished.append(int(unfinished[1]))
    for each in found:
        each.sort()
    return found


def complete_steps(folder: Path) -> list[int]:
    """The steps of the complete snapshots, ascending. Raises OSError."""
    return listed(folder).complete


def is_file_name(name: str) -> bool:
    """Returns whether a file of a snapshot may have this name."""
    return _OWN.fullmatch(name) is not None


def file_of(rank: int) -> str:
    """The file of the objects of one rank, which are no tensors."""
    return f"rank-{rank}.pt"


def local_path(rank: int) -> Path_:
    """The beginning of the paths of a rank's tensors, with local steps."""
    return ("local", str(rank))


def is_own(place: Path) -> bool:
    """Returns whether gradcast has made this folder."""
    mark = place / MARK
    return not place.is_symlink() and place.is_dir() and not mark.is_symlink() and mark.is_file()


def place_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def unfinished_of(place: Path) -> Path:
    return place.with_name(f"{place.name}.tmp")


def begin(place: Path) -> Path:
    """Makes the folder for the parts of a snapshot, which all ranks do. Raises OSError."""
    unfinished = unfinished_of(place)
    if os.path.lexists(place) and not _is_empty(place):
        raise FileExistsError(f"{place} is there already; move it elsewhere")
    unfinished.mkdir(parents=True, exist_ok=True)
    names = os.listdir(unfinished)
    if unfinished.is_symlink() or (names and MARK not in names):
        raise FileExistsError(f"gradcast has not made {unfinished}; move it elsewhere")
    if not names:
        with contextlib.suppress(FileExistsError):  # of another rank
            (unfinished / MARK).open("x").close()
    return unfinished


def complete(place: Path) -> None:
    """Gives the folder its name, with all that is in it. Raises OSError."""
    sync(unfinished_of(place))
    unfinished_of(place).rename(place)
    sync(place.parent)


def remove(place: Path) -> None:
    """Removes the files of a snapshot that gradcast has written, and the folder, if nothing else is in it. Raises
    OSError. REQUIRES: is_own(place)."""
    (place / METADATA).unlink(missing_ok=True)  # without it a snapshot is not there, so that none is ever half deleted
    for entry in place.iterdir():
        if entry.name == FRAMEWORK and entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif _OWN.fullmatch(entry.name) and not entry.is_dir():
            entry.unlink()
    if [each.name for each in place.iterdir()] == [MARK]:
        (place / MARK).unlink()
        place.rmdir()


def keep_newest(folder: Path, count: int) -> None:
    """Removes all complete snapshots but the newest ones. Raises OSError."""
    for step in complete_steps(folder)[:-count]:
        remove(place_of(folder, step))


def remove_leftovers(folder: Path, beyond: int | None) -> None:
    """Removes parts of snapshots that were never completed, and snapshots of steps after ``beyond``, which hosts with
    folders of their own do not all have. Raises OSError. REQUIRES: nobody writes into the folder."""
    kept = {place_of(folder, step) for step in complete_steps(folder) if beyond is None or step <= beyond}
    for entry in folder.iterdir():
        is_named = _COMPLETE.fullmatch(entry.name) or _UNFINISHED.fullmatch(entry.name)
        if is_named and entry not in kept and is_own(entry):
            remove(entry)


def set_aside(folder: Path, steps: Iterable[int]) -> None:
    """Renames snapshots that are not whole, so that others of the same steps can be written. Raises OSError."""
    for place in (place_of(folder, step) for step in steps):
        if is_own(place):
            place.rename(place.with_name(f"{place.name}.damaged-{secrets.token_hex(4)}"))


def require_room(folder: Path) -> None:
    """Raises Error(invalid_use) if another program has written files with names of snapshots into a folder that is not
    yet gradcast's: it would take a snapshot for its own, or delete it. Raises OSError."""
    found = listed(folder)
    if found.others and not found.complete and _owner(folder) is None:
        raise refused(
            f"{folder} holds {found.others[-1]}, which is no snapshot of this version of gradcast (no {MARK} is in it) "
            f"and stays as it is; give gradcast a folder of its own, such as {folder / 'gradcast'}"
        )


def take_over(folder: Path, name: str) -> None:
    """Marks the folder as that of these snapshots. Raises OSError."""
    mark, new = folder / MARK, folder / f"{MARK}-{name}"
    if os.path.lexists(mark) and _owner(folder) is None:
        raise FileExistsError(f"gradcast has not written {mark}; move it elsewhere")
    try:
        with new.open("x") as file:
            file.write(_OWNED_BY + name)
        new.replace(mark)  # ranks that look never see half of it
    finally:
        new.unlink(missing_ok=True)


def is_taken_over(folder: Path, name: str) -> bool:
    """Returns whether other snapshots have come into the folder since ``take_over``. A folder that is gone comes again
    with the next snapshot."""
    return _owner(folder) not in (None, name)


def _owner(folder: Path) -> str | None:
    """The name of the snapshots that have taken over the folder last."""
    mark = folder / MARK
    try:
        text = "" if mark.is_symlink() else mark.read_text()
    except (OSError, ValueError):
        return None
    return text.removeprefix(_OWNED_BY) if text.startswith(_OWNED_BY) else None


def _is_empty(place: Path) -> bool:
    return not place.is_symlink() and place.is_dir() and not any(place.iterdir())
