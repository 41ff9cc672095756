"""The first steps of a new plan: how long its blocks and compute take, held against what they were predicted to take.

Both may differ from what the warm-up has found, because in overlap mode forward runs beside the network and in the
warm-up it does not: blocks leave other pauses, and where ranks compute on cores that serve the sockets, too, compute
takes longer.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import TypeVar

from gradcast import _core
from gradcast.compare import compute_ns
from gradcast.files import scaled_profile
from gradcast.training import link_costs
from gradcast.training.group import Group
from gradcast.training.trace import StepRecord

T = TypeVar("T")

STEPS = 5
# Below this share a profile is right: another plan would not come of it.
_RIGHT = 0.03


@dataclasses.dataclass(frozen=True)
class Compute:
    """Of a step, ns, with nothing waited for. Forward is everything but backward and the update, as in a profile."""

    backward_ns: float
    forward_ns: float
    update_ns: float

    @property
    def total_ns(self) -> float:
        return self.backward_ns + self.forward_ns + self.update_ns


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
        self._blocks: list[list[float] | None] = []
        self._compute: list[Compute | None] = []

    def step_ended(self, iteration: _core.IterationRecord | None, compute: Compute | None) -> bool:
        """None where one tells nothing. Returns whether that was the last step."""
        blocks = [] if iteration is None else iteration.blocks
        usable = len(blocks) == len(self._sizes)
        self._blocks.append([float(block.finish_ns - block.launch_ns) for block in blocks] if usable else None)
        if usable and not self._one_by_one:
            self._blocks[-1] = [busy_ns(blocks)]
        self._compute.append(compute)
        return len(self._blocks) == STEPS

    def found(self, group: Group) -> Found:
        """The same on every rank. Collective."""
        ranks = group.gather((self._blocks[1:], self._compute[1:]))  # in the first step memory is allocated
        sizes = self._sizes if self._one_by_one else [sum(self._sizes)]
        return Found(
            [
                link_costs.samples([sizes], [[times] for times in step])
                for step in _measured_by_all([blocks for blocks, _ in ranks])
            ],
            _measured_by_all([compute for _, compute in ranks]),
        )


def compute_of(record: StepRecord, busy_ns: float) -> Compute:
    """``busy_ns``: of the step, what it did not wait."""
    backward_ns, update_ns = record.total_ns("backward"), record.total_ns("update")
    return Compute(backward_ns, max(0.0, busy_ns - backward_ns - update_ns), update_ns)


def with_compute(profile: _core.Profile, compute: Compute) -> _core.Profile:
    """Each part of a step as long as ``compute`` says, what happens within it at the same share of it."""
    old = profile.backward_ns, profile.forward_ns, sum(tensor.update_ns for tensor in profile.tensors)
    backward, forward, update = (
        new_ns / old_ns if old_ns > 0 else 1.0 for new_ns, old_ns in zip(dataclasses.astuple(compute), old, strict=True)
    )
    return scaled_profile(profile, forward, backward_factor=backward, update_factor=update)


def corrected_compute(profile: _core.Profile, steps: Sequence[Sequence[Compute]]) -> Compute | None:
    """What compute takes beside this plan, None where the profile is right. ``steps``: by step and rank.

    Over the ranks as in the profile: a block needs every rank's gradient, and forward is the usual rank's.
    """
    ranks = list(zip(*steps, strict=True))
    if not ranks:
        return None
    found = Compute(
        max(statistics.median(step.backward_ns for step in rank) for rank in ranks),
        statistics.median(statistics.median(step.forward_ns for step in rank) for rank in ranks),
        statistics.median(statistics.median(step.update_ns for step in rank) for rank in ranks),
    )
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


def _measured_by_all(ranks: Sequence[Sequence[T | None]]) -> list[tuple[T, ...]]:
    return [step for step in zip(*ranks, strict=True) if None not in step]
