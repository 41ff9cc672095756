"""A snapshot read by one process alone, for frameworks that go on from checkpoints of their own."""

from pathlib import Path
from typing import Any

from gradcast.errors import refused
from gradcast.snapshots import store
from gradcast.snapshots.resuming import optimizer_state
from gradcast.snapshots.state import COMMON, VERSION, from_bytes, own_path


def newest_step(folder: Path) -> int | None:
    """The step of the newest complete snapshot in ``folder``, which all ranks see; None without any."""
    return max(store.complete_steps(folder), default=None)


class Whole:
    """``extra``: by name, what each state_dict() returned. ``ranks``: by rank, its "random" state, "loader" and
    "plan". Tensors are read when they are asked for."""

    def __init__(self, folder: Path, step: int) -> None:
        """Raises Error(invalid_use) if the snapshot is of another version, or lacks files."""
        self.step = step
        self._reading = store.Reading(store.place_of(folder, step))
        if missing := self._reading.missing(self._reading.contents):
            raise refused(
                f"the snapshot of step {step} in {folder} is not whole: {missing[0]} is cut off or not there; a "
                "checkpoint for a framework needs a folder that all hosts share"
            )
        self._common: dict[str, Any] = from_bytes(self._reading.object(COMMON))
        if self._common["version"] != VERSION:
            raise refused(
                f"the snapshot of step {step} in {folder} does not fit: its format has the version "
                f"{self._common['version']}, and this gradcast reads {VERSION}"
            )
        if self._common.get("is_local", False):
            raise refused(
                f"the snapshot of step {step} in {folder} does not fit: it is of local steps; go on from it with "
                "gradcast.resume(), without the framework"
            )
        self.extra: dict[str, Any] = self._common["extra"]
        ranks = range(self._common["world_size"])
        self.ranks: list[dict[str, Any]] = [from_bytes(self._reading.object(own_path(rank))) for rank in ranks]

    def model(self) -> dict[str, Any]:
        """The module's state dict, in host memory."""
        contents = self._reading.contents.items()
        tensors = self._reading.tensors(path for path, value in contents if path[0] == "model" and value)
        return {path[1]: tensor for path, tensor in tensors.items()} | self._common["model"]

    def optimizers(self) -> list[dict[str, Any]]:
        """The optimizers' state dicts, in host memory."""
        found = enumerate(self._common["optimizers"])
        return [optimizer_state(self._reading, each, number)[0] for number, each in found]
