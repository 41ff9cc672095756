"""The first steps of a new plan: how long its blocks take, held against what they were predicted to take."""

from collections.abc import Sequence

from gradcast import _core
from gradcast.training import link_costs
from gradcast.training.group import Group

STEPS = 5


class Calibration:
    """Of one plan. Ends on all ranks after the same step, because every rank counts its own."""

    def __init__(self, plan: _core.Plan) -> None:
        self._sizes = [block.size_bytes for block in plan.blocks]
        self._steps: list[list[float] | None] = []

    def step_ended(self, iteration: _core.IterationRecord | None) -> bool:
        """``iteration``: None where it tells nothing. Returns whether that was the last step."""
        blocks = [] if iteration is None else iteration.blocks
        usable = len(blocks) == len(self._sizes)
        self._steps.append([float(block.finish_ns - block.launch_ns) for block in blocks] if usable else None)
        return len(self._steps) == STEPS

    def samples(self, group: Group) -> list[list[link_costs.Sample]]:
        """Of each step that all ranks have measured, the same on every rank. Collective."""
        ranks = group.gather(self._steps[1:])  # in the first one memory is allocated
        return [link_costs.samples([self._sizes], [[times] for times in step]) for step in _measured_by_all(ranks)]


def _measured_by_all(ranks: Sequence[Sequence[list[float] | None]]) -> list[tuple[list[float], ...]]:
    return [step for step in zip(*ranks, strict=True) if None not in step]
