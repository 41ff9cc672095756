"""Step time and efficiency on other numbers of workers, with a band that holds what the measurements leave open.

More workers change the link and nothing else: each computes what it did, on its own batch. So a point is a plan for
another link, and its band are plans for the cheapest and the dearest link that growth.py allows.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gradcast import _core
from gradcast.comparison.compare import BASELINE, compute_ns, ratio, total_bytes
from gradcast.errors import Error
from gradcast.scaling.growth import ALGORITHMS, SPREAD, Cluster, Network, Nodes

MEASURED = "measured"  # the name of the network that the profiles come from
WORKERS = tuple(2**k for k in range(1, 13))
# Twice the workers, one and a half times the throughput: half of the workers that are added go to waste.
_WORTH_IT = math.log2(1.5)
# Where a sample takes more worker time than this many times the least, more workers are for those in a hurry only.
_DEAR = 2


@dataclass(frozen=True)
class Options:
    workers: tuple[int, ...] = WORKERS
    algorithms: tuple[str, ...] = ALGORITHMS
    networks: tuple[Network, ...] = ()  # instead of the one that the profiles were measured on
    measured_algorithm: str = "ring"  # what the library ran when the profiles were measured
    nodes: Nodes | None = None
    spread: float = SPREAD  # of measured costs, as a share
    policy: str = _core.DEFAULT_POLICY
    mode: str = "overlap"
    in_flight: int = 1


@dataclass(frozen=True)
class Point:
    workers: int
    network: str
    algorithm: str
    step_ns: float
    low_ns: float
    high_ns: float
    efficiency: float  # share of a step that one worker without communication would need
    basis: str  # "measured", "fitted" or "extrapolated"
    ddp_ns: float  # DDP's step, in hook mode
    bound_ns: float  # no plan of all-reduces is faster on this link

    @property
    def throughput(self) -> float:
        """How many single workers without communication do as much."""
        return self.workers * self.efficiency


@dataclass(frozen=True)
class Band:
    points: tuple[Point, ...]
    knee: int | None  # of the first network and its own algorithm; None: the last point pays; 1: none does
    knee_low: int | None  # where all costs are as high as the measurements allow
    knee_high: int | None
    unpaid: tuple[tuple[int, int], ...]  # from and to which numbers of workers, up to the knee, more do not pay
    worth_trying: tuple[int, ...]
    skipped: dict[str, str] = field(default_factory=dict)  # network and algorithm: why points are missing

    def curves(self) -> dict[tuple[str, str], list[Point]]:
        """By network and algorithm, ascending by workers; the one that the knee belongs to first."""
        found: dict[tuple[str, str], list[Point]] = {}
        for point in self.points:
            found.setdefault((point.network, point.algorithm), []).append(point)
        return found


def band(profiles: _core.Profile | Sequence[_core.Profile], options: Options | None = None) -> Band:
    """``profiles``: of one model, each measured on another number of workers."""
    options = options or Options()
    given = [profiles] if isinstance(profiles, _core.Profile) else list(profiles)
    _check(given, options)
    networks = options.networks or (measured_network(given, options.measured_algorithm),)
    points: list[Point] = []
    skipped: dict[str, str] = {}
    for network in networks:
        cluster = Cluster(network, options.nodes, options.spread)
        # Its own algorithm first: the knee is of that one.
        for algorithm in sorted(options.algorithms, key=lambda name: name != network.algorithm):
            for workers in _counts(options.workers, network):
                reason = cluster.why_not(algorithm, workers)
                if reason is not None:
                    skipped[f"{network.name}, {algorithm}"] = reason
                    continue
                points.append(_point(given, options, cluster, algorithm, workers))
    if not points:
        raise Error(f"no number of workers can be predicted: {'; '.join(dict.fromkeys(skipped.values()))}")
    first = [p for p in points if (p.network, p.algorithm) == (points[0].network, points[0].algorithm)]
    alone_ns = min(compute_ns(each) for each in given)
    steps = _with_one(alone_ns, [(p.workers, p.step_ns) for p in first])
    return Band(
        points=tuple(points),
        knee=knee(steps),
        knee_low=knee(_with_one(alone_ns, [(p.workers, p.high_ns) for p in first])),
        knee_high=knee(_with_one(alone_ns, [(p.workers, p.low_ns) for p in first])),
        unpaid=unpaid(steps),
        worth_trying=worth_trying(first, knee(steps)),
        skipped=skipped,
    )


def measured_network(profiles: Sequence[_core.Profile], algorithm: str = "ring") -> Network:
    """The network of the profiles' own links."""
    costs: dict[int, _core.LinkModel] = {}
    for profile in profiles:
        if profile.link is None:
            raise Error(
                f"the profile {profile.name} holds no link; say which network: --bandwidth 10gbit, or --network 10gbe "
                "(`gradcast networks` lists them)"
            )
        if profile.world_size < 2:
            raise Error(
                f"the profile {profile.name} was measured on one worker, which has no traffic; measure on two or more, "
                "or say which network: --bandwidth 10gbit"
            )
        if profile.world_size in costs:
            raise Error(
                f"two profiles were measured on {profile.world_size} workers; give one for each number of workers"
            )
        costs[profile.world_size] = profile.link
    return Network(MEASURED, tuple(sorted(costs.items(), key=lambda cost: cost[0])), algorithm)


def _with_one(alone_ns: float, steps: list[tuple[int, float]]) -> list[tuple[int, float]]:
    return steps if steps[0][0] == 1 else [(1, alone_ns), *steps]


def _pays(fewer: tuple[int, float], more: tuple[int, float]) -> bool:
    """Of (workers, ns): whether each doubling brings 1.5 times the throughput."""
    return ratio(more[0] * fewer[1], fewer[0] * more[1]) >= (more[0] / fewer[0]) ** _WORTH_IT


def knee(steps: Sequence[tuple[int, float]]) -> int | None:
    """The last number of workers that pays against the one before it, of (workers, ns) ascending; None where the last
    one given still does, the first where none does.

    The last one is asked for, because a first doubling may bring little while later ones do: a ring of two workers
    sends each byte once, one of many twice.
    """
    paying = [more[0] for fewer, more in itertools.pairwise(steps) if _pays(fewer, more)]
    last = paying[-1] if paying else steps[0][0]
    return None if last == steps[-1][0] else last


def unpaid(steps: Sequence[tuple[int, float]]) -> tuple[tuple[int, int], ...]:
    """What does not pay before the knee, from and to which numbers of workers."""
    last = knee(steps) or math.inf
    found = [(fewer, more) for fewer, more in itertools.pairwise(steps) if more[0] <= last]
    return tuple((fewer[0], more[0]) for fewer, more in found if not _pays(fewer, more))


def worth_trying(points: Sequence[Point], last: int | None) -> tuple[int, ...]:
    """The numbers of workers up to the knee, ``last``, that do more than any smaller one and than a single worker, at
    no more than twice the worker time per sample of the cheapest of them."""
    cheapest = max(point.efficiency for point in points)
    found: list[int] = []
    best = 1.0
    for point in points:
        if (last is None or point.workers <= last) and point.throughput > best and _DEAR * point.efficiency >= cheapest:
            found.append(point.workers)
            best = point.throughput
    return tuple(found)


def as_json(found: Band) -> dict[str, Any]:
    """The value of "scaling" in doctor.json; times in ms."""
    return {
        "points": [
            {
                "workers": point.workers,
                "network": point.network,
                "algorithm": point.algorithm,
                "step_ms": point.step_ns / 1e6,
                "low_ms": point.low_ns / 1e6,
                "high_ms": point.high_ns / 1e6,
                "efficiency": point.efficiency,
                "basis": point.basis,
            }
            for point in found.points
        ],
        "knee_workers": found.knee,
        "worth_trying": list(found.worth_trying),
        "left_out": list(dict.fromkeys(found.skipped.values())),
    }


def _check(profiles: Sequence[_core.Profile], options: Options) -> None:
    if not profiles:
        raise Error("no profile is given")
    sizes = {(total_bytes(profile), len(profile.tensors)) for profile in profiles}
    if len(sizes) > 1:
        names = ", ".join(profile.name for profile in profiles)
        raise Error(f"these profiles are not of one model ({names}): their gradients differ in number or bytes")
    for algorithm in options.algorithms:
        if algorithm not in ALGORITHMS:
            raise Error(f"there is no algorithm {algorithm}; there are {', '.join(ALGORITHMS)}")
    if not options.workers or not options.algorithms:
        raise Error("a band needs at least one number of workers and one algorithm")


def _counts(workers: Sequence[int], network: Network) -> list[int]:
    """What was measured is always shown."""
    known = [count for count, _ in network.costs] if network.measured else []
    return sorted({*workers, *known})


def _point(
    profiles: Sequence[_core.Profile], options: Options, cluster: Cluster, algorithm: str, workers: int
) -> Point:
    # Compute as it was where the number of workers was the nearest: more of them slow each other down a little.
    profile = min(profiles, key=lambda p: (abs(math.log(p.world_size / workers)), -p.world_size))
    estimate = cluster.estimate(algorithm, workers)

    def plan(link: _core.LinkModel) -> _core.Plan:
        return _core.make_plan(profile, link, policy=options.policy, mode=options.mode, in_flight=options.in_flight)

    step_ns = plan(estimate.link).predicted_ns
    return Point(
        workers=workers,
        network=cluster.network.name,
        algorithm=algorithm,
        step_ns=step_ns,
        # A policy that is no search may be slower on a cheaper link, which is no reason for a band without its middle.
        low_ns=min(step_ns, plan(estimate.low).predicted_ns),
        high_ns=max(step_ns, plan(estimate.high).predicted_ns),
        efficiency=ratio(min(compute_ns(each) for each in profiles), step_ns),
        basis=estimate.basis,
        ddp_ns=_core.make_plan(profile, estimate.link, policy=BASELINE, mode="hook").predicted_ns,
        bound_ns=_core.bound(profile, estimate.link, mode=options.mode, in_flight=options.in_flight).best_ns,
    )
