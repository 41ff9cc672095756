"""The time that each stage of a step costs the group, and the rank that causes it, from the step reports.

The stages are added up from a point where all ranks are together: from the end of the stage in which they wait for the
network, and so for each other. In hook mode that stage is backward, in overlap mode forward. During the warm-up and on
the baseline, overlap mode waits for everything in ``step()``, so there it is the loop.

Synchronization hides a cause: if one rank loads data for long, the others see a long backward pass. So each rank adds
up its stages, and at the end of each stage the largest sum counts: the stage costs the group by how much the largest
sum grows. The increments add up exactly to the step of the slowest rank, and the ranks need no common clock.
(B. Yoon, W. Chen, V. Kallioniemi, *StageFrontier: synchronization-aware stage accounting for distributed ML training*,
arXiv 2606.06751, section 3.)
"""

import collections
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gradcast.training.measure.step_trace import StepRecord
from gradcast.training.ranks.step_reports import STAGES, StepReport

_STEPS_KEPT = 64


@dataclasses.dataclass(frozen=True)
class Stage:
    """``exposed``: cost of the stage for the group, in the unit of the durations. ``rank``: the slowest one so far."""

    exposed: float
    rank: int


def frontier(durations: Sequence[Sequence[float]]) -> list[Stage]:
    """Returns the group's cost of each stage. ``durations``: by rank and stage, the stages in the order of a step."""
    sums = [0.0] * len(durations)
    reached = 0.0
    stages = []
    for each in zip(*durations, strict=True):
        sums = [total + duration for total, duration in zip(sums, each, strict=True)]
        furthest = max(sums)
        stages.append(Stage(furthest - reached, sums.index(furthest)))
        reached = furthest
    return stages


class StageExposure:
    """The exposure of the last steps. It is the same on every rank, since all ranks have the same reports."""

    def __init__(self) -> None:
        self._steps: collections.deque[list[Stage]] = collections.deque(maxlen=_STEPS_KEPT)
        # Evaluated when somebody asks, not in every step.
        self._unread: collections.deque[Sequence[StepReport]] = collections.deque(maxlen=_STEPS_KEPT)
        self._before: dict[str, float] = {}
        self._waiting_stage = STAGES[-1]

    def set_waiting_stage(self, stage: str) -> None:
        """Sets the stage at whose end the ranks are together. If it changes, earlier steps are forgotten."""
        if stage != self._waiting_stage:
            self._waiting_stage = stage
            self._steps.clear()
            self._unread.clear()

    def own_stages_ns(self, record: StepRecord, step_ns: float) -> dict[str, float]:
        """This rank's stages in the step that ends now.

        Here a step goes from the end of one waiting stage to the next one, so the stages after the waiting stage are
        those of the record before. In the first step they are the record's own.
        """
        stages = {"backward": float(record.backward_ns), "forward": float(record.total_ns("forward"))}
        stages["loop"] = max(0.0, step_ns - sum(stages.values()))
        before, self._before = self._before or stages, stages
        earlier = STAGES[STAGES.index(self._waiting_stage) + 1 :]
        return stages | {name: before[name] for name in earlier}

    def add(self, reports: Sequence[StepReport]) -> None:
        """Adds a step. ``reports``: in rank order."""
        self._unread.append(reports)

    def stats(self) -> dict[str, Mapping[str, Any]] | None:
        """Median exposure in ms of each stage, and the rank that is most often last at its end. None without steps."""
        while self._unread:
            self._steps.append(self._stages(self._unread.popleft()))
        if not self._steps:
            return None
        found: dict[str, Mapping[str, Any]] = {}
        for name, steps in zip(self._order, zip(*self._steps, strict=True), strict=True):
            rank = collections.Counter(stage.rank for stage in steps).most_common(1)[0][0]
            found[name] = {"ms": statistics.median(stage.exposed for stage in steps) / 1e6, "rank": rank}
        return found

    def _stages(self, reports: Sequence[StepReport]) -> list[Stage]:
        stages = frontier([[report.stages_ns[name] for name in self._order] for report in reports])
        # All ranks end the last stage together. The others have waited for the one that took longest without waiting.
        own_ns = [sum(report.stages_ns.values()) - (report.facts.step_ns - report.facts.busy_ns) for report in reports]
        stages[-1] = Stage(stages[-1].exposed, own_ns.index(max(own_ns)))
        return stages

    @property
    def _order(self) -> tuple[str, ...]:
        first = STAGES.index(self._waiting_stage) + 1
        return STAGES[first:] + STAGES[:first]
