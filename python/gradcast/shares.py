"""Shares of a global batch that follow each rank's speed. Pure: ranks decide the same from the same steps.

A rank's time is taken to be proportional to its samples. If a part of it is fixed, the first shares miss the best ones
by about that part, and each further change by that part of what is left, so a few changes find them. A fixed part is
not fitted: shares differ too little for that, and a rank that slows down between two shares would look like one.
"""

import heapq
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Shares change only for a gain of this part of a step. Even ones are taken if they are as good up to _EVEN, and come
# back for a gain of that.
_LEAST_GAIN = 0.03
_EVEN = 0.01
# In so many steps of the window the change need not have helped: no single step decides.
_EXCEPTIONS = 1
# Nor does chance: the gain is at least so many standard errors of a rank's median time per sample.
_ERRORS = 2.5
_SCATTER_OF_NORMAL = 1.4826  # standard deviation over median absolute deviation
_ERROR_OF_MEDIAN = 1.2533  # standard error of a median over that of a mean


@dataclass(frozen=True)
class Step:
    """One step of all ranks. ``weights``: by rank, as a rule samples; ``busy_ns``: by rank, without waits."""

    weights: tuple[float, ...]
    busy_ns: tuple[float, ...]
    step_ns: float


@dataclass(frozen=True)
class Change:
    """``shares``: samples of each rank. ``busy_ns``: compute of the slowest rank then. ``step_ns``,
    ``present_step_ns``, ``even_step_ns``: predicted with these shares, with the present and with even ones.
    ``slowest_rank``, ``slowness``: its time per sample over that of the median rank."""

    shares: tuple[int, ...]
    busy_ns: float
    step_ns: float
    present_step_ns: float
    even_step_ns: float
    slowest_rank: int
    slowness: float

    def sentence(self) -> str:
        even_ms, ms, present_ms = (each / 1e6 for each in (self.even_step_ns, self.step_ns, self.present_step_ns))
        if max(self.shares) - min(self.shares) <= 1:
            return f"the ranks compute alike: present shares {present_ms:.0f} ms, even {even_ms:.0f} ms"
        return (
            f"rank {self.slowest_rank} computes {self.slowness:.1f} times as slowly: even shares {even_ms:.0f} ms, "
            f"balanced {ms:.0f} ms"
        )


def even_shares(batch: int, world_size: int) -> tuple[int, ...]:
    """Returns even shares; the first ranks get one sample more where they cannot be equal."""
    return tuple(batch // world_size + (rank < batch % world_size) for rank in range(world_size))


def best_shares(batch: int, times: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers of at least 1 that add up to ``batch``, with the least longest time of a rank. ``times``: of one
    sample, by rank. REQUIRES: batch >= number of ranks.

    Sample by sample, each to the rank that is done first with it. That is optimal, since a rank's time only grows.
    """
    speeds = [1 / each for each in times]
    shares = [max(1, math.floor(batch * speed / sum(speeds))) for speed in speeds]
    if sum(shares) > batch:
        shares = [1] * len(times)
    heap = [(time * (share + 1), rank) for rank, (time, share) in enumerate(zip(times, shares, strict=True))]
    heapq.heapify(heap)
    for _ in range(batch - sum(shares)):
        _, rank = heap[0]
        shares[rank] += 1
        heapq.heapreplace(heap, (times[rank] * (shares[rank] + 1), rank))
    return tuple(shares)


def part_of(shares: Sequence[int], count: int) -> tuple[int, ...]:
    """The shares of a smaller batch, in about the same proportion."""
    return tuple(shares) if count == sum(shares) else best_shares(count, [1 / each for each in shares])


def matches(weights: Sequence[float], shares: Sequence[int], other: Sequence[int]) -> bool:
    """Returns True if a step's weights are nearer to ``shares`` than to the ``other`` ones."""
    distances = [
        sum(abs(weight / sum(weights) - share / sum(each)) for weight, share in zip(weights, each, strict=True))
        for each in (shares, other)
    ]
    return distances[0] < distances[1]


def choose(steps: Sequence[Step], present: Sequence[int]) -> Change | None:
    """Returns clearly better shares than the present ones, or None. ``steps``: with the present shares.

    REQUIRES: every rank has a weight above 0 in each step.
    """
    ranks, batch = range(len(present)), sum(present)
    # Where weights are tokens or a step has several batches: how many of a step's weights a sample stands for.
    per_sample = statistics.median(sum(step.weights) for step in steps) / batch
    own_times = [[per_sample * step.busy_ns[r] / step.weights[r] for step in steps] for r in ranks]
    times = [statistics.median(each) for each in own_times]
    if min(times) <= 0:
        return None
    deviation = statistics.median(abs(each / times[r] - 1) for r in ranks for each in own_times[r])
    error = _ERROR_OF_MEDIAN * _SCATTER_OF_NORMAL * deviation / math.sqrt(len(steps))
    even = even_shares(batch, len(present))
    new = best_shares(batch, times)
    if _longest(times, even) <= (1 + _EVEN) * _longest(times, new):
        new = even
    rest_ns = max(0.0, statistics.median(step.step_ns - max(step.busy_ns) for step in steps))

    def is_better(own: Sequence[float], gain: float) -> bool:
        return _longest(own, new) + rest_ns < (1 - gain) * (_longest(own, present) + rest_ns)

    least_gain = _EVEN if new == even else _LEAST_GAIN
    helped = sum(is_better(own, least_gain) for own in zip(*own_times, strict=True))
    if helped < len(steps) - _EXCEPTIONS:
        return None
    if not is_better(times, least_gain if new == even else max(least_gain, _ERRORS * error)):
        return None
    busy_ns, present_ns = _longest(times, new), _longest(times, present)
    slowest = max(ranks, key=lambda r: times[r])
    median_time = sorted(times)[(len(times) - 1) // 2]  # of some rank, and of two the faster one's
    step_ns, now_ns, even_ns = (each + rest_ns for each in (busy_ns, present_ns, _longest(times, even)))
    return Change(new, busy_ns, step_ns, now_ns, even_ns, slowest, times[slowest] / median_time)


def _longest(times: Sequence[float], shares: Sequence[int]) -> float:
    return max(time * share for time, share in zip(times, shares, strict=True))
