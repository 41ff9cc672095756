"""The first steps of a new plan: times of its blocks and its compute, compared with the prediction.

Both may differ from what the warm-up measured, since no blocks are in flight during its forward passes. Blocks leave
other pauses, and compute takes longer if ranks compute on the cores that also serve the sockets, or on a GPU beside
NCCL's kernels.
"""

import dataclasses
from collections.abc import Callable, Sequence

from gradcast import _core
from gradcast.comparison.compare import compute_ns, link_of
from gradcast.intervals import busy_periods_ns
from gradcast.training.measure import compute_cost, network_cost
from gradcast.training.measure.compute_cost import Compute, steps_known_on_all_ranks
from gradcast.training.ranks.group import Group

STEPS = 9
# A profile that is off by less is not corrected: the plan would come out the same.
_ACCURATE_SHARE = 0.03


@dataclasses.dataclass(frozen=True)
class CalibrationSteps:
    """The steps that all ranks have measured.

    ``blocks``: network time by step and block; one sample per step, of all blocks together, if several blocks may be
    in flight. ``compute``: by step and rank.
    """

    blocks: list[list[network_cost.Sample]]
    compute: list[tuple[Compute, ...]]


class Calibration:
    """Collects one rank's first steps of a plan. Every rank counts its steps, so all end after the same one."""

    def __init__(self, plan: _core.Plan, pack_ns_per_byte: float) -> None:
        self._plan = plan
        self._packing_ns = [pack_ns_per_byte * block.size_bytes * (len(block.ranges) > 1) for block in plan.blocks]
        self._blocks: list[list[network_cost.Sample] | None] = []
        self._compute: list[Callable[[], Compute | None] | None] = []

    def add_step(self, iteration: _core.IterationRecord | None, compute: Callable[[], Compute | None] | None) -> bool:
        """Returns whether this was the last step. Pass None for what the step did not measure. ``compute`` is asked
        after the last step: it may wait for the device."""
        blocks = [] if iteration is None else iteration.blocks
        self._blocks.append(self._samples(blocks) if len(blocks) == len(self._plan.blocks) else None)
        self._compute.append(compute)
        return len(self._blocks) == STEPS

    def _samples(self, blocks: Sequence[_core.BlockRecord]) -> list[network_cost.Sample]:
        """The network's part of each block: a link model has a cost of its own for packing."""
        samples = network_cost.samples_of_rank(self._plan, blocks)
        if self._plan.in_flight > 1:
            together_ns = sum(busy_periods_ns((block.due_ns, block.finish_ns) for block in blocks))
            return [network_cost.Sample(sum(each.size_bytes for each in samples), together_ns)]
        return [
            each._replace(time_ns=max(1.0, each.time_ns - packing_ns))
            for each, packing_ns in zip(samples, self._packing_ns, strict=True)
        ]

    def gather(self, group: Group) -> CalibrationSteps:
        """Returns all ranks' steps. Collective. Raises Error, on every rank, if one cannot measure its steps."""
        ranks = group.computed_by_each(self._measured, "measuring the plan's first steps")
        return CalibrationSteps(
            [network_cost.combined(step) for step in steps_known_on_all_ranks([blocks for blocks, _ in ranks])],
            steps_known_on_all_ranks([compute for _, compute in ranks]),
        )

    def _measured(self) -> tuple[list[list[network_cost.Sample] | None], list[Compute | None]]:
        """Returns this rank's steps. On a device, waits for it."""
        return self._blocks[1:], [each and each() for each in self._compute[1:]]  # the first step allocates memory


def corrected_compute(profile: _core.Profile, steps: Sequence[Sequence[Compute]]) -> Compute | None:
    """The compute time under this plan, or None if the profile is accurate. ``steps``: by step and rank."""
    if not steps:
        return None
    typical = compute_cost.typical_compute(steps)
    return None if abs(typical.total_ns / compute_ns(profile) - 1) <= _ACCURATE_SHARE else typical


def planned_busy_periods_ns(plan: _core.Plan, profile: _core.Profile) -> list[float]:
    """Lengths of the periods in which a step keeps the network busy, predicted by `play`. If several blocks may be in
    flight, one hides the start-up cost of the next."""
    return busy_periods_ns(
        (block.launch_ns, block.finish_ns) for block in _core.play(profile, link_of(profile), plan).blocks
    )
