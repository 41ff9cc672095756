"""Duration of a training on machines that may be revoked: simulated, and exact for exponential lifetimes.

The training stops when any of its machines is revoked. Its work since the last checkpoint is lost, a new machine joins,
and the training continues after a restart time. A revocation during a restart begins the restart again.

An elastic training loses a machine and goes on with the others, each as fast as in a cluster of their number (S. Li et
al., *Speeding up deep learning with transient servers*, ICAC 2019, arXiv 1903.00045). When the last one is revoked, it
continues from its last checkpoint, after a restart time, with as many as at first.
"""

import heapq
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from gradcast.scaling.prices import Spot

# A training is abandoned if it takes this many times as long as without revocations.
ABANDONED_FACTOR = 20
# Stop if the first 20 runs are abandoned. If half of all runs end, that happens once in a million times.
_FIRST_RUNS = 20
# exp() of more overflows a double.
_EXPONENT_MAX = 700.0
# Of lifetimes, in one simulation: some seconds.
_DRAWS_MAX = 5_000_000


class SimulationTooLongError(Exception):
    """The trainings meet so many revocations that simulating all clusters would take very long."""


class _Lifetimes:
    def __init__(self, spot: Spot, revocations: float, run_count: int, seed: int) -> None:
        """``revocations``: of a training without delay; delays multiply it by up to ABANDONED_FACTOR."""
        if min(run_count, _FIRST_RUNS) * revocations > _DRAWS_MAX / ABANDONED_FACTOR:
            raise SimulationTooLongError
        self._scale_s = 3600 / spot.revocations_per_hour / math.gamma(1 + 1 / spot.shape)
        self._shape, self._run_count = spot.shape, run_count
        self._random, self._count = random.Random(seed), 0

    def draw_s(self) -> float:
        self._count += 1
        if self._count > _DRAWS_MAX:
            raise SimulationTooLongError
        return self._random.weibullvariate(self._scale_s, self._shape)

    def check_pace(self, done: int) -> None:
        """Raises SimulationTooLongError if all runs take too many lifetimes, judged by the first ``done`` runs."""
        if self._count / done * self._run_count > _DRAWS_MAX:
            raise SimulationTooLongError


def _checkpoint_count(work_s: float, spot: Spot) -> int:
    """Returns the number of checkpoints; none follows the last part."""
    return max(math.ceil(work_s / spot.checkpoint_interval_s) - 1, 0)


def undisturbed_s(work_s: float, spot: Spot) -> float:
    """Time of a training of ``work_s`` with its checkpoints and without revocations."""
    return work_s + _checkpoint_count(work_s, spot) * spot.checkpoint_cost_s


def _revocations(work_s: float, machine_count: int, spot: Spot) -> float:
    return machine_count * (1 + undisturbed_s(work_s, spot) / 3600 * spot.revocations_per_hour)


def expected_s(work_s: float, machine_count: int, spot: Spot) -> float:
    """Mean time with exponential lifetimes; ``spot.shape`` is ignored. Infinite if it overflows a double.

    A part of s seconds that begins again after each revocation takes e^(rate R) (e^(rate s) - 1) / rate on average,
    with restarts of R seconds: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart
    dumps", Future Generation Computer Systems 22 (2006).
    """
    rate = machine_count * spot.revocations_per_hour / 3600
    if rate == 0:
        return undisturbed_s(work_s, spot)
    checkpoint_count = _checkpoint_count(work_s, spot)
    part_s = spot.checkpoint_interval_s + spot.checkpoint_cost_s
    last_s = work_s - checkpoint_count * spot.checkpoint_interval_s
    if rate * max(part_s, last_s, spot.restart_s) > _EXPONENT_MAX / 2:
        return math.inf
    parts = checkpoint_count * math.expm1(rate * part_s) + math.expm1(rate * last_s)
    return math.exp(rate * spot.restart_s) * parts / rate


def simulate_s(work_s: float, machine_count: int, spot: Spot, *, run_count: int, seed: int) -> list[float]:
    """Times of ``run_count`` simulated trainings, ascending; infinite if abandoned. Equal seeds give equal times.
    Raises SimulationTooLongError."""
    if spot.revocations_per_hour == 0:
        return [undisturbed_s(work_s, spot)] * run_count
    limit_s = ABANDONED_FACTOR * undisturbed_s(work_s, spot)
    # With another shape the mean may be very different.
    if spot.shape == 1 and expected_s(work_s, machine_count, spot) > limit_s:
        return [math.inf] * run_count
    lifetimes = _Lifetimes(spot, _revocations(work_s, machine_count, spot), run_count, seed)
    times_s: list[float] = []
    for _ in range(run_count):
        times_s.append(_one_run_s(work_s, machine_count, spot, lifetimes.draw_s, limit_s))
        if len(times_s) == _FIRST_RUNS:
            if min(times_s) == math.inf:
                return [math.inf] * run_count
            lifetimes.check_pace(_FIRST_RUNS)
    return sorted(times_s)


def _one_run_s(work_s: float, machine_count: int, spot: Spot, lifetime_s: Callable[[], float], limit_s: float) -> float:
    ends_s = [lifetime_s() for _ in range(machine_count)]
    heapq.heapify(ends_s)
    part_s = spot.checkpoint_interval_s + spot.checkpoint_cost_s
    now_s = 0.0
    while now_s <= limit_s:
        end_s = now_s + undisturbed_s(work_s, spot)
        if end_s <= ends_s[0]:
            return end_s
        work_s -= (ends_s[0] - now_s) // part_s * spot.checkpoint_interval_s
        now_s = ends_s[0]
        heapq.heapreplace(ends_s, now_s + lifetime_s())
        while ends_s[0] < now_s + spot.restart_s and now_s <= limit_s:
            now_s = ends_s[0]
            heapq.heapreplace(ends_s, now_s + lifetime_s())
        now_s += spot.restart_s
    return math.inf


class ElasticRun(NamedTuple):
    """One simulated training. ``machine_s``: paid time of all machines together."""

    time_s: float
    machine_s: float


def elastic_run(speeds: Sequence[float], ends_s: Sequence[float], work: float = 1.0) -> ElasticRun | None:
    """Returns the training whose machines leave at ``ends_s`` (ascending; machines without an entry stay).

    None if they all leave before its end. ``speeds``: work per second with 1, 2, … machines.
    """
    machine_s = 0.0
    for begin_s, end_s, count in _phases(len(speeds), ends_s):
        needed_s = work / speeds[count - 1]
        if needed_s <= end_s - begin_s:
            return ElasticRun(begin_s + needed_s, machine_s + count * needed_s)
        work -= speeds[count - 1] * (end_s - begin_s)
        machine_s += count * (end_s - begin_s)
    return None


def _phases(machine_count: int, ends_s: Sequence[float]) -> Iterator[tuple[float, float, int]]:
    """Yields begin, end and number of machines of each phase."""
    begins_s = [0.0, *ends_s]
    for left, (begin_s, end_s) in enumerate(zip(begins_s, [*ends_s, math.inf], strict=True)):
        if left < machine_count:
            yield begin_s, end_s, machine_count - left


def simulate_elastic(
    work_s: float, shares: Sequence[float], spot: Spot, *, run_count: int, seed: int
) -> list[ElasticRun]:
    """Simulated trainings, ascending by time; infinite if abandoned. ``work_s``: with all machines. ``shares``: speed
    with 1, 2, … machines as a share of that with all. Raises SimulationTooLongError.
    """
    undisturbed = undisturbed_s(work_s, spot)
    limit_s = ABANDONED_FACTOR * undisturbed
    lifetimes = _Lifetimes(spot, _revocations(work_s, len(shares), spot), run_count, seed)
    # Checkpoints are paid with a little of the speed, so that it does not matter when they are written.
    speeds = [share / undisturbed for share in shares]
    part_s = spot.checkpoint_interval_s + spot.checkpoint_cost_s

    def one_run() -> ElasticRun:
        now_s = machine_s = 0.0
        work = 1.0
        while now_s <= limit_s:
            ends_s = sorted(lifetimes.draw_s() for _ in speeds)
            found = elastic_run(speeds, ends_s, work)
            if found is not None:
                return ElasticRun(now_s + found.time_s, machine_s + found.machine_s)
            saved_s = ends_s[-1] // part_s * part_s
            for begin_s, end_s, count in _phases(len(speeds), ends_s):
                work -= speeds[count - 1] * max(0.0, min(end_s, saved_s) - begin_s)
            now_s += ends_s[-1] + spot.restart_s
            machine_s += sum(ends_s) + len(speeds) * spot.restart_s
        return ElasticRun(math.inf, math.inf)

    runs = [one_run() for _ in range(min(_FIRST_RUNS, run_count))]
    lifetimes.check_pace(len(runs))
    return sorted([*runs, *(one_run() for _ in range(run_count - len(runs)))])


def quantile(ascending: list[float], share: float) -> float:
    """The smallest value that at least this share of all values do not exceed."""
    return ascending[max(math.ceil(share * len(ascending)) - 1, 0)]


def mean_s(ascending_s: list[float], work_s: float, spot: Spot) -> float:
    """Mean time; abandoned trainings count with the time until then. Infinite if more than half were abandoned."""
    if quantile(ascending_s, 0.5) == math.inf:
        return math.inf
    limit_s = ABANDONED_FACTOR * undisturbed_s(work_s, spot)
    return sum(limit_s if time_s == math.inf else time_s for time_s in ascending_s) / len(ascending_s)
