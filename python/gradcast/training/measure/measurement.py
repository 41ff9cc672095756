"""What one rank has measured in the warm-up."""

import dataclasses

from gradcast.training.measure import network_cost
from gradcast.training.measure.compute_cost import Compute


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One rank's medians, ns, by parameter. ``compute``: per warm-up step, None where it is not known. ``blocks``: per
    warm-up step, per block of its plan."""

    ready_ns: list[float]
    need_ns: list[float]
    compute: list[Compute | None]
    block_bytes: list[list[int]]
    blocks: list[list[network_cost.BlockDuration]]
    pack_ns_per_byte: float
    unseen_reads: list[int] = dataclasses.field(default_factory=list)  # see Stopwatch
