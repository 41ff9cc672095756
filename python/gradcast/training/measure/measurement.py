"""What one rank measured during the warm-up."""

import dataclasses

from gradcast.training.measure import network_cost
from gradcast.training.measure.compute_cost import Compute


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One rank's measurements; times in ns.

    ``ready_ns``, ``need_ns``: median by parameter. ``compute``: by warm-up step, None if it could not be measured.
    ``block_bytes``, ``blocks``: by warm-up step and block. ``unseen_reads``: parameters whose reads no hook sees.
    """

    ready_ns: list[float]
    need_ns: list[float]
    compute: list[Compute | None]
    block_bytes: list[list[int]]
    blocks: list[list[network_cost.BlockDuration]]
    pack_ns_per_byte: float
    unseen_reads: list[int] = dataclasses.field(default_factory=list)
