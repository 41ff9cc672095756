"""The first steps of a new plan: how long its blocks and compute take, held against what they were predicted to take.

Both may differ from what the warm-up has found, because in overlap mode forward runs beside the network and in the
warm-up it does not: blocks leave other pauses, and where ranks compute on cores that serve the sockets, too, compute
takes longer.
"""

import dataclasses
from collections.abc import Sequence

from gradcast import _core
from gradcast.compare import compute_ns
from gradcast.training import compute_times, link_costs
from gradcast.training.compute_times import Compute, measured_by_all
from gradcast.training.group import Group

STEPS = 9
# Below this share a profile is right: another plan would not come of it.
_RIGHT = 0.03


@dataclasses.dataclass(frozen=True)
class Found:
    """Of the steps that all ranks have measured: by step and block what the network took (where several blocks may be
    in flight, of all of them together), and by step and rank."""

    blocks: list[list[link_costs.Sample]]
    compute: list[tuple[Compute, ...]]


class Calibration:
    """Of one plan. Ends on all ranks after the same step, because every rank counts its own."""

    def __init__(self, plan: _core.Plan) -> None:
        self._sizes = [block.size_bytes for block in plan.blocks]
        self._one_by_one = plan.in_flight == 1
        self._blocks: list[list[link_costs.Took] | None] = []
        self._compute: list[Compute | None] = []

    def step_ended(self, iteration: _core.IterationRecord | None, compute: Compute | None) -> bool:
        """None where one tells nothing. Returns whether that was the last step."""
        blocks = [] if iteration is None else iteration.blocks
        together = link_costs.Took(busy_ns(blocks), at_once=False)
        taken = link_costs.took(blocks) if self._one_by_one else [together]
        self._blocks.append(taken if len(blocks) == len(self._sizes) else None)
        self._compute.append(compute)
        return len(self._blocks) == STEPS

    def found(self, group: Group) -> Found:
        """The same on every rank. Collective."""
        ranks = group.gather((self._blocks[1:], self._compute[1:]))  # in the first step memory is allocated
        sizes = self._sizes if self._one_by_one else [sum(self._sizes)]
        return Found(
            [
                link_costs.samples([sizes], [[times] for times in step])
                for step in measured_by_all([blocks for blocks, _ in ranks])
            ],
            measured_by_all([compute for _, compute in ranks]),
        )


def corrected_compute(profile: _core.Profile, steps: Sequence[Sequence[Compute]]) -> Compute | None:
    """What compute takes beside this plan, None where the profile is right. ``steps``: by step and rank."""
    if not steps:
        return None
    found = compute_times.of_slowest(steps)
    return None if abs(found.total_ns / compute_ns(profile) - 1) <= _RIGHT else found


def busy_ns(blocks: Sequence[_core.BlockRecord] | Sequence[_core.BlockTimes]) -> float:
    """For how long some block is on the network."""
    total_ns, end_ns = 0.0, 0.0
    for block in sorted(blocks, key=lambda each: each.launch_ns):
        total_ns += max(0.0, block.finish_ns - max(block.launch_ns, end_ns))
        end_ns = max(end_ns, block.finish_ns)
    return total_ns


def planned_busy_ns(plan: _core.Plan, profile: _core.Profile) -> float:
    """For how long a step keeps the network busy, as ``play`` has it: where several blocks may be in flight, one hides
    the start-up of the next."""
    return busy_ns(_core.play(profile, profile.link, plan).blocks)
