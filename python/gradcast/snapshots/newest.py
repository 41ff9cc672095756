"""The newest snapshot that is whole, chosen by all ranks together.

Where hosts keep parts of their own, they send each other the files that a rank reads and its host does not have.
"""

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from gradcast.errors import Error, refused
from gradcast.snapshots import store
from gradcast.snapshots.files import DamageError, Stored
from gradcast.snapshots.reading import Reading
from gradcast.training.ranks.group import Group

T = TypeVar("T")
_PIECE_BYTES = 4 << 20


def on_every_rank(group: Group, compute: Callable[[], T]) -> T:
    """Returns what ``compute`` returns here. If it raises on one rank, every rank raises Error. Collective."""
    try:
        with group.together("the agreement on snapshots"):
            return compute()
    except Error:
        raise
    except Exception as error:  # of a single worker
        raise refused(f"{type(error).__name__}: {error}") from error


def newest_whole(folder: Path, group: Group) -> tuple[Reading | None, list[int]]:
    """Returns the newest snapshot that is whole on all ranks, with what this rank needs of it, and the steps of newer
    ones that are damaged. None if no rank sees any, or only a first one that was not complete on all. Raises
    Error(invalid_use) on every rank, also if none is whole. Collective."""
    own = on_every_rank(group, lambda: store.listed(folder))
    everyone = group.gather(own)
    damaged: dict[int, str] = {}
    for step in sorted(set.intersection(*(set(each.complete) for each in everyone)), reverse=True):
        reading, reason = _read(store.place_of(folder, step), group)
        if reason is None:
            _tell_newer(step, damaged, everyone, folder, group)
            return reading, list(damaged)
        damaged[step] = reason
    if damaged:
        raise refused(
            f"no snapshot in {folder} is whole: {_listed(damaged)}; restore the files, or name an empty folder to "
            "begin anew"
        )
    _require_nothing_missing(folder, everyone)
    on_every_rank(group, lambda: store.require_room(folder))
    return None, []


def _tell_newer(
    step: int, damaged: dict[int, str], everyone: Sequence[store.Listing], folder: Path, group: Group
) -> None:
    reasons = dict(damaged)
    for rank, other in enumerate(everyone):
        for each in {number for listing in everyone for number in listing.complete} - set(other.complete):
            if each > step:
                reasons.setdefault(each, f"not on rank {rank}")
    if reasons:
        group.warning(
            "snapshots: training goes on from step %d in %s, since newer ones are not whole: %s",
            step, folder, _listed(reasons),
        )  # fmt: skip


def _listed(reasons: dict[int, str]) -> str:
    return ", ".join(f"step {step} ({reason})" for step, reason in sorted(reasons.items(), reverse=True))


def _require_nothing_missing(folder: Path, everyone: Sequence[store.Listing]) -> None:
    """Raises Error(invalid_use) if a rank lacks the newest snapshot of another: all ranks have had it."""
    for rank, seen in enumerate(everyone):
        for other, its in enumerate(everyone):
            if seen.complete and seen.complete[-1] not in its.complete + its.unfinished:
                raise refused(
                    f"rank {rank} sees a snapshot of step {seen.complete[-1]} in {folder}, and rank {other} does not; "
                    "start on the hosts that have taken it, or copy the folder, or name an empty one to begin anew"
                )


def _read(place: Path, group: Group) -> tuple[Reading | None, str | None]:
    """Reads what this rank needs of a snapshot, after files that it lacks were sent from a rank that has them. Returns
    why the snapshot is not whole, the same on all ranks. Raises Error(invalid_use) on every rank if a file cannot be
    written. Collective."""
    reading, failure, lacking = on_every_rank(group, lambda: _opened(place, group.rank))
    answers = group.gather((failure, lacking, reading and _identity(reading)))
    for rank, (each, _, identity) in enumerate(answers):
        if each is not None:
            return None, f"rank {rank}: {each}"
        if identity != answers[0][2]:
            return None, f"ranks 0 and {rank} have parts of different snapshots"
    every = [(name, f"rank {rank}: {why}") for rank, (_, its, _) in enumerate(answers) for name, why in its.items()]
    reasons = dict(reversed(every))  # of the first rank
    if reasons:
        assert reading is not None, "no rank has failed"
        own = on_every_rank(group, lambda: [name for name in reasons if reading.is_whole(name)])
        held = group.gather(own)
        for name, reason in reasons.items():
            sender = next((rank for rank, names in enumerate(held) if name in names), None)
            if sender is None:
                return None, reason
            failures = group.gather(_send(reading.place / name, group, sender, lacks=name in lacking))
            if first := next((each for each in failures if each is not None), None):
                raise refused(f"the snapshot {place} cannot be completed: {first}; let it be written, or copy the file")
        failed = on_every_rank(group, lambda: reading.load(lacking))
        left = [next(iter(each.values()), None) for each in group.gather(failed)]
        if first := next((f"rank {rank}: {each}" for rank, each in enumerate(left) if each is not None), None):
            return None, first
    return reading, None


def _opened(place: Path, rank: int) -> tuple[Reading | None, str | None, dict[str, str]]:
    try:
        reading = Reading(place)
        return reading, None, reading.load(reading.needed_by(rank))
    except (DamageError, OSError) as error:
        return None, str(error), {}


def _identity(reading: Reading) -> dict[str, Stored]:
    """The files of the ranks. The others are written by each host for itself."""
    return {name: each for name, each in reading.files.items() if name not in (store.LAYOUT, store.OF_TORCH)}


def _send(file: Path, group: Group, sender: int, *, lacks: bool) -> str | None:
    """Copies a file from one rank to those that lack it. Returns why this rank has failed, if so. Collective."""
    rank, failure, offset = group.rank, None, 0
    new = file.with_name(f"{file.name}.{secrets.token_hex(4)}")  # ranks of a host may write the same one at once
    while True:
        piece = b""
        try:
            if rank == sender:
                with file.open("rb") as stream:
                    stream.seek(offset)
                    piece = stream.read(_PIECE_BYTES)
        except OSError as error:
            failure = f"rank {rank} cannot read {file.name} ({error})"
        piece = group.gather(piece)[sender]
        try:
            if lacks and failure is None:
                with new.open("ab" if offset else "xb") as stream:
                    stream.write(piece)
                if not piece:
                    new.replace(file)
        except OSError as error:
            failure = f"rank {rank} cannot write {file.name} ({error})"
        if not piece:
            return failure
        offset += len(piece)
