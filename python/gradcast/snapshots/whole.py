"""A snapshot read by one process alone, for frameworks that go on from checkpoints of their own."""

import dataclasses
from pathlib import Path
from typing import Any

from gradcast.errors import refused
from gradcast.snapshots import store
from gradcast.snapshots.resuming import optimizer_state
from gradcast.snapshots.state import COMMON, VERSION, from_bytes, own_path


@dataclasses.dataclass(frozen=True)
class Whole:
    """``model``: the module's state dict. ``optimizers``: their state dicts. ``extra``: by name, what
    each state_dict() returned. ``ranks``: by rank, its "random" state, "loader" and "plan"."""

    step: int
    model: dict[str, Any]
    optimizers: list[dict[str, Any]]
    extra: dict[str, Any]
    ranks: list[dict[str, Any]]


def newest_step(folder: Path) -> int | None:
    """Of the complete snapshots in ``folder``, which all ranks see; None if there is none."""
    return max(store.complete_steps(folder), default=None)


def read_whole(folder: Path, step: int) -> Whole:
    """Raises Error(invalid_use) if the snapshot is of another version, or lacks files."""
    reading = store.Reading(store.place_of(folder, step))
    if missing := reading.missing():
        raise refused(
            f"the snapshot of step {step} in {folder} is not whole: {missing[0]} is cut off or not there; a checkpoint "
            "for a framework needs a folder that all hosts share"
        )
    common = from_bytes(reading.object(COMMON))
    if common["version"] != VERSION:
        raise refused(
            f"the snapshot of step {step} in {folder} does not fit: its format has the version {common['version']}, "
            f"and this gradcast reads {VERSION}"
        )
    model = reading.tensors(path for path, value in reading.contents.items() if path[0] == "model" and value)
    return Whole(
        step,
        {path[1]: tensor for path, tensor in model.items()} | common["model"],
        [optimizer_state(reading, each, number)[0] for number, each in enumerate(common["optimizers"])],
        common["extra"],
        [from_bytes(reading.object(own_path(rank))) for rank in range(common["world_size"])],
    )
