"""Exposed time of each stage of a step, from what every rank's stages took, without a common clock.

Synchronization hides a cause: a rank that loads data for long is seen by the others as a long backward pass. So the
stages are added up on each rank, and at each stage's end the rank that has come to the largest sum counts: what that
largest sum grows by is the time that the stage costs the group. The increments add up to the step of the slowest rank
exactly. (B. Yoon, W. Chen, V. Kallioniemi, *StageFrontier: synchronization-aware stage accounting for distributed ML
training*, arXiv 2606.06751, section 3.)

Pure. Thread safety: pure; any thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
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
