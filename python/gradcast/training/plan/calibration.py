"""The first steps of a new plan: how long its blocks and compute take, held against what they were predicted to take.

Both may differ from what the warm-up has found, because in overlap mode forward runs beside the network and in the
warm-up it does not: blocks leave other pauses, and where ranks compute on cores that serve the sockets, too, compute
takes longer.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

from gradcast import _core
from gradcast.comparison.compare import compute_ns
from gradcast.training.measure import compute_cost, network_cost
from gradcast.training.measure.compute_cost import Compute, measured_by_all
from gradcast.training.ranks.group import Group

STEPS = 9
# Below this share a profile is right: another plan would not come of it.
_RIGHT = 0.03


@dataclasses.dataclass(frozen=True)
class Found:
    """Of the steps that all ranks have measured: by step and block what the network took (where several blocks may be
    in flight, of all of them together), and by step and rank."""

    blocks: list[list[network_cost.Sample]]
    compute: list[tuple[Compute, ...]]


class Calibration:
    """Of one plan. Ends on all ranks after the same step, because every rank counts its own."""

    def __init__(self, plan: _core.Plan, pack_ns_per_byte: float) -> None:
        self._sizes = [block.size_bytes for block in plan.blocks]
        self._packing_ns = [pack_ns_per_byte * block.size_bytes * (len(block.ranges) > 1) for block in plan.blocks]
        self._one_by_one = plan.in_flight == 1
        self._blocks: list[list[network_cost.BlockDuration] | None] = []
        self._compute: list[Compute | None] = []

    def step_ended(self, iteration: _core.IterationRecord | None, compute: Compute | None) -> bool:
        """None where one tells nothing. Returns whether that was the last step."""
        blocks = [] if iteration is None else iteration.blocks
        self._blocks.append(self._taken(blocks) if len(blocks) == len(self._sizes) else None)
        self._compute.append(compute)
        return len(self._blocks) == STEPS

    def _taken(self, blocks: Sequence[_core.BlockRecord]) -> list[network_cost.BlockDuration]:
        """Of the network: packing has a cost of its own in a link."""
        if not self._one_by_one:
            together_ns = sum(busy_periods_ns([(block.due_ns, block.finish_ns) for block in blocks]))
            return [network_cost.BlockDuration(together_ns, at_once=False)]
        taken = map(network_cost.took, blocks)
        return [
            dataclasses.replace(each, time_ns=max(1.0, each.time_ns - packing_ns))
            for each, packing_ns in zip(taken, self._packing_ns, strict=True)
        ]

    def found(self, group: Group) -> Found:
        """The same on every rank. Collective."""
        ranks = group.gather((self._blocks[1:], self._compute[1:]))  # in the first step memory is allocated
        sizes = self._sizes if self._one_by_one else [sum(self._sizes)]
        return Found(
            [
                network_cost.samples([sizes], [[times] for times in step])
                for step in measured_by_all([blocks for blocks, _ in ranks])
            ],
            measured_by_all([compute for _, compute in ranks]),
        )


def corrected_compute(profile: _core.Profile, steps: Sequence[Sequence[Compute]]) -> Compute | None:
    """What compute takes beside this plan, None where the profile is right. ``steps``: by step and rank."""
    if not steps:
        return None
    found = compute_cost.of_slowest(steps)
    return None if abs(found.total_ns / compute_ns(profile) - 1) <= _RIGHT else found


def busy_periods_ns(blocks: Iterable[tuple[float, float]]) -> list[float]:
    """For how long some block is on the network each time, from the times when each begins and ends."""
    periods_ns: list[float] = []
    busy_until_ns = -math.inf
    for begin_ns, end_ns in sorted(blocks):
        if begin_ns > busy_until_ns:
            periods_ns.append(0.0)
        periods_ns[-1] += max(0.0, end_ns - max(begin_ns, busy_until_ns))
        busy_until_ns = max(busy_until_ns, end_ns)
    return periods_ns


def planned_busy_periods_ns(plan: _core.Plan, profile: _core.Profile) -> list[float]:
    """How a step keeps the network busy, as ``play`` has it: where several blocks may be in flight, one hides the
    start-up of the next."""
    return busy_periods_ns(
        (block.launch_ns, block.finish_ns) for block in _core.play(profile, profile.link, plan).blocks
    )
