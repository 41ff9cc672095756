"""A snapshot read by one process alone, for frameworks that go on from checkpoints of their own."""

from pathlib import Path
from typing import Any

from gradcast.errors import refused
from gradcast.snapshots.newest import newest_whole
from gradcast.snapshots.parts import optimizer_state, saved_in
from gradcast.snapshots.reading import Reading
from gradcast.training.ranks.group import Group


class Whole:
    """``extra``: the results of state_dict(), by name. ``ranks``: by rank, its "random" state, "loader" and
    "plan". ``damaged``: steps of newer snapshots that are not whole."""

    def __init__(self, reading: Reading, damaged: list[int]) -> None:
        """Raises Error(invalid_use) if the snapshot is of local steps."""
        self.step, self.damaged = reading.step, damaged
        if reading.is_local:
            raise refused(
                f"the snapshot {reading.place} does not fit: it is of local steps; go on from it with "
                "gradcast.resume(), without the framework"
            )
        every = [saved_in(reading, rank) for rank in range(reading.world_size)]
        self._common, self.ranks = every[0].common, [each.own for each in every]
        self._model: dict[str, Any] = self._common["model"]
        self.extra: dict[str, Any] = self._common["extra"]
        self._tensors = reading.tensors

    def model(self) -> dict[str, Any]:
        """The module's state dict, in host memory."""
        tensors = self._tensors.items()
        return {path[1]: tensor for path, tensor in tensors if path[0] == "model"} | self._model

    def optimizers(self) -> list[dict[str, Any]]:
        """The optimizers' state dicts, in host memory."""
        found = enumerate(self._common["optimizers"])
        return [optimizer_state(self._tensors, each, number)[0] for number, each in found]

    def forget_tensors(self) -> None:
        self._tensors = {}


def newest(folder: Path) -> Whole | None:
    """The newest snapshot in ``folder`` that is whole, of all ranks; None without any. Raises Error(invalid_use), also
    if hosts keep parts of their own."""
    reading, damaged = newest_whole(folder, Group(0, 1))
    return None if reading is None else Whole(reading, damaged)
