"""Which stage of a step costs the group its time, and on which rank that begins, from what the notes tell anyway.

The stages are added up from where the ranks are together: from the end of the one in which they wait for the network
and so for each other. In hook mode that is backward, in overlap mode forward, and where overlap mode waits for all at
once, in the warm-up or running as DDP, it is ``step()``, in the loop.

Synchronization hides a cause: the other ranks see a rank that loads data for long as a long backward pass. So each rank
adds up its stages, and at the end of each stage the rank with the largest sum counts: the stage costs the group what
that largest sum grows by. The increments add up to the step of the slowest rank exactly, and no common clock is needed.
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
    """``exposed`` in the unit of the durations; ``rank``: the one that is furthest at the stage's end."""

    exposed: float
    rank: int


def frontier(durations: Sequence[Sequence[float]]) -> list[Stage]:
    """``durations``: by rank and stage, the stages in the order in which a step runs through them."""
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
    """Of the last steps. Every rank adds the same, since notes are the same everywhere."""

    def __init__(self) -> None:
        self._steps: collections.deque[list[Stage]] = collections.deque(maxlen=_STEPS_KEPT)
        # What they say is worked out where somebody asks, not in every step.
        self._unread: collections.deque[Sequence[StepReport]] = collections.deque(maxlen=_STEPS_KEPT)
        self._before: dict[str, float] = {}
        self._last = STAGES[-1]

    def together_after(self, stage: str) -> None:
        """From now on. What was before began elsewhere."""
        if stage != self._last:
            self._last = stage
            self._steps.clear()
            self._unread.clear()

    def own_stages_ns(self, record: StepRecord, step_ns: float) -> dict[str, float]:
        """Of this rank's step that ends now; a step here goes from the end of one ``together_after`` to the next, so
        that some stages are those of the record before; of the first one its own."""
        stages = {"backward": float(record.backward_ns), "forward": float(record.total_ns("forward"))}
        stages["loop"] = max(0.0, step_ns - sum(stages.values()))
        before, self._before = self._before or stages, stages
        earlier = STAGES[STAGES.index(self._last) + 1 :]
        return stages | {name: before[name] for name in earlier}

    def add(self, notes: Sequence[StepReport]) -> None:
        """Of one step, in rank order."""
        self._unread.append(notes)

    def stats(self) -> dict[str, Mapping[str, Any]] | None:
        """Per stage the median ms by which it moves the furthest rank, and the rank that is most often the furthest at
        its end."""
        while self._unread:
            self._steps.append(self._stages(self._unread.popleft()))
        if not self._steps:
            return None
        found = {}
        for name, steps in zip(self._order, zip(*self._steps, strict=True), strict=True):
            rank = collections.Counter(stage.rank for stage in steps).most_common(1)[0][0]
            found[name] = {"ms": statistics.median(stage.exposed for stage in steps) / 1e6, "rank": rank}
        return found

    def _stages(self, notes: Sequence[StepReport]) -> list[Stage]:
        stages = frontier([[note.stages_ns[name] for name in self._order] for note in notes])
        # At the end of the last stage all are there together: the one that got there without waiting is the one that
        # the others have waited for.
        own_ns = [sum(note.stages_ns.values()) - (note.facts.step_ns - note.facts.busy_ns) for note in notes]
        stages[-1] = Stage(stages[-1].exposed, own_ns.index(max(own_ns)))
        return stages

    @property
    def _order(self) -> tuple[str, ...]:
        first = STAGES.index(self._last) + 1
        return STAGES[first:] + STAGES[:first]
