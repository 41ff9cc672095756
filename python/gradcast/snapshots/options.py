"""The arguments of ``handle.snapshots`` that say what a snapshot holds, and how often and how one is written."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SnapshotOptions:
    """See Handle.snapshots."""

    overhead: float
    keep: int
    every: int | None
    loader: Any
    extra: dict[str, Any]
    write_bytes_per_s: float | None
    over_network: bool
    signals: Sequence[int]
