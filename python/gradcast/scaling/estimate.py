"""Step time and efficiency on other numbers of workers, with a band for the uncertainty of the measurements.

More workers change nothing but the link: each computes as before, on its own batch. So each point is a plan for another
link, and its band is given by plans for the cheapest and the most expensive link that growth.py allows.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from gradcast import _core
from gradcast.comparison.compare import BASELINE, compute_ns, ratio, total_bytes
from gradcast.comparison.measured_exchange import in_a_ring
from gradcast.errors import Error
from gradcast.scaling.growth import ALGORITHMS, SPREAD, Cluster, Network, Nodes

MEASURED = "measured"  # the name of the network that the profiles come from
WORKERS = tuple(2**k for k in range(1, 13))
# Adding workers pays if doubling them brings at least 1.5 times the throughput: then half of the added ones are wasted.
_PAYING_EXPONENT = math.log2(1.5)
# Numbers of workers are not recommended if a sample takes more worker time than this many times the least.
_EXPENSIVE_RATIO = 2


@dataclass(frozen=True)
class Options:
    workers: tuple[int, ...] = WORKERS
    algorithms: tuple[str, ...] = ALGORITHMS
    networks: tuple[Network, ...] = ()  # instead of the one on which the profiles were measured
    measured_algorithm: str = "ring"  # that the library used when the profiles were measured
    nodes: Nodes | None = None
    spread: float = SPREAD  # relative uncertainty of measured costs
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
    efficiency: float  # one worker's step without communication, divided by step_ns
    basis: str  # "measured", "fitted" or "extrapolated"
    ddp_ns: float  # DDP's step, in hook mode
    bound_ns: float  # lower bound over plans of all-reduces on this link

    @property
    def throughput(self) -> float:
        """Throughput in units of one worker without communication."""
        return self.workers * self.efficiency

    @property
    def speedup_over_ddp(self) -> float:
        return ratio(self.ddp_ns, self.step_ns)


@dataclass(frozen=True)
class Band:
    points: tuple[Point, ...]
    knee: int | None  # of the first network and its own algorithm, see knee(); None: the last point still pays
    knee_low: int | None  # if all costs are as high as the measurements allow
    knee_high: int | None  # if they are as low as the measurements allow
    unpaid: tuple[tuple[int, int], ...]  # steps before the knee that do not pay: (workers, more workers)
    worth_trying: tuple[int, ...]
    skipped: dict[str, str] = field(default_factory=dict)  # by network and algorithm: why points are missing

    def curves(self) -> dict[tuple[str, str], list[Point]]:
        """Points by (network, algorithm), ascending by workers; the curve of the knee comes first."""
        found: dict[tuple[str, str], list[Point]] = {}
        for point in self.points:
            found.setdefault((point.network, point.algorithm), []).append(point)
        return found


def band(profiles: _core.Profile | Sequence[_core.Profile], options: Options | None = None) -> Band:
    """Predicts all points. ``profiles``: of one model, each measured on another number of workers."""
    options = options or Options()
    given = [profiles] if isinstance(profiles, _core.Profile) else list(profiles)
    _check(given, options)
    networks = options.networks or (measured_network(given, options.measured_algorithm),)
    points: list[Point] = []
    skipped: dict[str, str] = {}
    for network in networks:
        cluster = Cluster(network, options.nodes, options.spread)
        known = [count for count, _ in network.costs] if network.measured else []
        # The network's own algorithm comes first: the knee belongs to it.
        for algorithm in sorted(options.algorithms, key=lambda name: name != network.algorithm):
            for workers in sorted({*options.workers, *known}):
                reason = cluster.why_not(algorithm, workers)
                if reason is not None:
                    skipped[f"{network.name}, {algorithm}"] = reason
                    continue
                points.append(_point(given, options, cluster, algorithm, workers))
    if not points:
        raise Error(f"no number of workers can be predicted: {'; '.join(dict.fromkeys(skipped.values()))}")
    first = [p for p in points if (p.network, p.algorithm) == (points[0].network, points[0].algorithm)]
    alone = [] if first[0].workers == 1 else [(1, min(compute_ns(each) for each in given))]
    steps, expensive, cheap = (
        [*alone, *((p.workers, getattr(p, name)) for p in first)] for name in ("step_ns", "high_ns", "low_ns")
    )
    return Band(
        points=tuple(points),
        knee=knee(steps),
        knee_low=knee(expensive),
        knee_high=knee(cheap),
        unpaid=unpaid(steps),
        worth_trying=worth_trying(first, knee(steps)),
        skipped=skipped,
    )


def measured_network(profiles: Sequence[_core.Profile], algorithm: str = "ring") -> Network:
    costs: dict[int, _core.LinkModel] = {}
    for profile in profiles:
        if profile.link is None:
            raise Error(
                f"the profile {profile.name} has no link; name a network with --bandwidth 10gbit or --network 10gbe "
                "(`gradcast dev published-networks` lists them)"
            )
        if profile.world_size < 2:
            raise Error(
                f"the profile {profile.name} was measured on one worker, which sends nothing; measure on two or more, "
                "or name a network with --bandwidth 10gbit"
            )
        if profile.world_size in costs:
            raise Error(
                f"two profiles were measured on {profile.world_size} workers; give one for each number of workers"
            )
        costs[profile.world_size] = cast(_core.LinkModel, in_a_ring(profile).link)
    return Network(MEASURED, tuple(sorted(costs.items(), key=lambda cost: cost[0])), algorithm)


def _pays(fewer: tuple[int, float], more: tuple[int, float]) -> bool:
    """Returns True if each doubling brings at least 1.5 times the throughput. Arguments: (workers, step ns)."""
    return ratio(more[0] * fewer[1], fewer[0] * more[1]) >= (more[0] / fewer[0]) ** _PAYING_EXPONENT


def knee(steps: Sequence[tuple[int, float]]) -> int | None:
    """Returns the last number of workers that pays, compared with the one before it.

    ``steps``: (workers, step ns), ascending. None if the last one given still pays, the first one if none does. The
    first doubling may bring little while later ones pay: a ring of two workers sends each byte once, a ring of many
    nearly twice.
    """
    paying = [more[0] for fewer, more in itertools.pairwise(steps) if _pays(fewer, more)]
    last = paying[-1] if paying else steps[0][0]
    return None if last == steps[-1][0] else last


def unpaid(steps: Sequence[tuple[int, float]]) -> tuple[tuple[int, int], ...]:
    """Returns the steps before the knee that do not pay, as (workers, more workers)."""
    last = knee(steps) or math.inf
    found = [(fewer, more) for fewer, more in itertools.pairwise(steps) if more[0] <= last]
    return tuple((fewer[0], more[0]) for fewer, more in found if not _pays(fewer, more))


def worth_trying(points: Sequence[Point], last: int | None) -> tuple[int, ...]:
    """Returns the numbers of workers to recommend, up to the knee ``last``.

    Each has a higher throughput than any smaller number, and takes at most twice the least worker time per sample.
    """
    cheapest = max(point.efficiency for point in points)
    found: list[int] = []
    best = 1.0
    for point in points:
        if (
            (last is None or point.workers <= last)
            and point.throughput > best
            and _EXPENSIVE_RATIO * point.efficiency >= cheapest
        ):
            found.append(point.workers)
            best = point.throughput
    return tuple(found)


def as_json(found: Band) -> dict[str, Any]:
    """The value of "scaling" in doctor.json; times are in ms."""
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
        raise Error("no profile is given; give at least one")
    sizes = {(total_bytes(profile), len(profile.tensors)) for profile in profiles}
    if len(sizes) > 1:
        names = ", ".join(profile.name for profile in profiles)
        raise Error(f"these profiles are not of one model ({names}): their gradients differ in number or bytes")
    for algorithm in options.algorithms:
        if algorithm not in ALGORITHMS:
            raise Error(f"there is no algorithm {algorithm}; there are {', '.join(ALGORITHMS)}")
    if not options.workers or not options.algorithms:
        raise Error("nothing can be predicted without a number of workers and an algorithm; give at least one of each")


def _point(
    profiles: Sequence[_core.Profile], options: Options, cluster: Cluster, algorithm: str, workers: int
) -> Point:
    # Compute is that of the nearest number of workers: more of them slow each other down a little.
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
        # Policies that do not search may be slower on a cheaper link; the band must still hold its middle.
        low_ns=min(step_ns, plan(estimate.low).predicted_ns),
        high_ns=max(step_ns, plan(estimate.high).predicted_ns),
        efficiency=ratio(min(compute_ns(each) for each in profiles), step_ns),
        basis=estimate.basis,
        ddp_ns=_core.make_plan(profile, estimate.link, policy=BASELINE, mode="hook").predicted_ns,
        bound_ns=_core.bound(profile, estimate.link, mode=options.mode, in_flight=options.in_flight).best_ns,
    )
