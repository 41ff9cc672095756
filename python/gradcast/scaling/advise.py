"""Recommends machines to rent: the cheapest within a time, the fastest within a cost, and those in between.

The rules are those of Stash (A. Sharma et al., arXiv:2208.14344). Stash measures a step on each kind of machine; here
steps that were not measured are predicted (estimate.py), and each result says so.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from gradcast import _core
from gradcast.comparison.compare import BASELINE
from gradcast.comparison.measured_exchange import exchange_of
from gradcast.errors import Error
from gradcast.files import scaled_profile
from gradcast.scaling.estimate import Band, Options, Point, band, measured_network
from gradcast.scaling.growth import SPREAD, Network, Nodes, from_hop, hop
from gradcast.scaling.prices import Machine, Prices, Spot
from gradcast.scaling.spot import (
    ABANDONED_FACTOR,
    SimulationTooLongError,
    mean_s,
    quantile,
    simulate_elastic,
    simulate_s,
)

# A spot training that is recommended for a time ends within it nine times out of ten.
_CONFIDENCE = 0.9
PREDICTED, ON_MEASURED = "predicted", "predicted on measured costs"


@dataclass(frozen=True)
class Request:
    worker_steps: float  # length of the training: number of batches, of all workers together
    measured_on: str | None = None  # the machine on which the profiles were measured
    measured_algorithm: str = "ring"  # that the library used then
    algorithm: str = "ring"
    policy: str = _core.DEFAULT_POLICY
    spread: float = SPREAD
    run_count: int = 300  # simulated trainings of each spot cluster
    seed: int = 1


@dataclass(frozen=True)
class ClusterOption:
    """One cluster that could be rented, with the time and the cost of the whole training.

    Times are in hours, costs in the currency of the price file.
    """

    machine: str
    machines: int
    workers: int
    spot: bool
    step_ns: float
    hours: float  # mean time, for spot clusters
    low_hours: float
    high_hours: float
    sure_hours: float  # for spot clusters at least the mean, and not exceeded by nine of ten trainings
    price_per_hour: float  # of the cluster; the mean over the time if machines leave
    basis: str  # of the step: PREDICTED or ON_MEASURED

    @property
    def cost(self) -> float:
        return self.hours * self.price_per_hour

    @property
    def sure_cost(self) -> float:
        return self.sure_hours * self.price_per_hour

    def describe(self) -> str:
        return _cluster(self.machine, self.machines, self.spot)


@dataclass(frozen=True)
class Advice:
    rows: tuple[ClusterOption, ...]  # the fastest first
    frontier: tuple[ClusterOption, ...]  # the rows to which no other row is both faster and cheaper
    skipped: dict[str, str]  # by cluster: why it is omitted

    def cheapest_within(self, hours: float) -> ClusterOption | None:
        return min((row for row in self.rows if row.sure_hours <= hours), key=lambda row: row.cost, default=None)

    def fastest_within(self, cost: float) -> ClusterOption | None:
        return min((row for row in self.rows if row.sure_cost <= cost), key=lambda row: row.hours, default=None)


def advise(profiles: Sequence[_core.Profile], prices: Prices, request: Request) -> Advice:
    """Predicts all clusters of the price file. ``profiles``: of one model, as for ``estimate.band``."""
    names = [machine.name for machine in prices.machines]
    if request.measured_on is not None and request.measured_on not in names:
        raise Error(f"{prices.path} has no machine {request.measured_on}; it has {', '.join(names)}")
    # Speeds are relative to the machine that was profiled, or to 1 if that is not known.
    base = next((machine.speed for machine in prices.machines if machine.name == request.measured_on), 1.0)
    machines = [dataclasses.replace(machine, speed=machine.speed / base) for machine in prices.machines]
    found: list[ClusterOption] = []
    skipped: dict[str, str] = {}
    for machine in machines:
        rows, missing = _machine_rows(profiles, machine, request)
        found += rows
        skipped |= missing
    found.sort(key=lambda row: (row.hours, row.cost))
    return Advice(tuple(found), pareto_rows(found), skipped)


def pareto_rows(rows: Sequence[ClusterOption]) -> tuple[ClusterOption, ...]:
    """The rows to which no other row is both faster and cheaper. ``rows``: ascending by time."""
    found: list[ClusterOption] = []
    for row in rows:
        if not found or row.cost < found[-1].cost:
            found.append(row)
    return tuple(found)


def machine_counts(machine: Machine, world_sizes: Sequence[int] = ()) -> list[int]:
    """Returns 1, 2, 4, … up to the most there are, and the counts that the measured numbers of workers fill."""
    counts = {2**k for k in range(machine.max_machines.bit_length())} | {machine.max_machines}
    counts |= {size // machine.workers for size in world_sizes if size % machine.workers == 0}
    return sorted(count for count in counts if 1 <= count <= machine.max_machines)


def _cluster(machine: str, machine_count: int, spot: bool) -> str:
    return f"{machine_count} x {machine}{' (spot)' if spot else ''}"


def _machine_rows(
    profiles: Sequence[_core.Profile], machine: Machine, request: Request
) -> tuple[list[ClusterOption], dict[str, str]]:
    counts = machine_counts(machine, [p.world_size for p in profiles] if machine.name == request.measured_on else [])
    found = _band(profiles, machine, request, counts)
    points = {point.workers // machine.workers: point for point in found.points if point.workers % machine.workers == 0}
    rows: list[ClusterOption] = []
    skipped: dict[str, str] = {}
    for count in counts:
        if count not in points:
            # With one network and one algorithm there is one reason for all missing points.
            skipped[_cluster(machine.name, count, False)] = next(iter(found.skipped.values()))
            continue
        rows.append(_on_demand(machine, points[count], request))
        if machine.spot is None:
            continue
        try:
            row = _on_spot(rows[-1], machine.spot, points[count], request, _shares(points, count))
        except SimulationTooLongError:
            why = f"{request.run_count} simulated trainings with so many revocations take too long; give fewer --runs"
            skipped[_cluster(machine.name, count, True)] = why
            continue
        if row.hours < math.inf:
            rows.append(row)
        else:
            skipped[row.describe()] = f"revocations make the training {ABANDONED_FACTOR} times as long or more"
    return rows, skipped


def _band(profiles: Sequence[_core.Profile], machine: Machine, request: Request, counts: Sequence[int]) -> Band:
    network, nodes = _network(profiles if machine.name == request.measured_on else [], machine, request)
    options = Options(
        workers=tuple(count * machine.workers for count in counts),
        algorithms=(request.algorithm,),
        networks=(network,),
        nodes=nodes,
        spread=request.spread,
        policy=request.policy,
        # With DDP all gradients arrive before the next forward pass.
        mode="hook" if request.policy == BASELINE else "overlap",
    )
    return band([scaled_profile(profile, 1 / machine.speed) for profile in profiles], options)


def _network(measured: Sequence[_core.Profile], machine: Machine, request: Request) -> tuple[Network, Nodes]:
    """Returns the networks between machines and inside one: measured, or else from the price file.

    A profile without hosts is taken to be of one machine, if one can hold all ranks. One of several hosts with fewer
    ranks than this machine holds counts for neither network.
    """
    linked = [profile for profile in measured if profile.world_size > 1 and profile.link is not None]
    inner = [each for each in linked if each.world_size <= machine.workers and _host_count(each) in (None, 1)]
    outer = [each for each in linked if each.world_size > machine.workers and _host_count(each) != 1]
    algorithm = request.measured_algorithm
    # A single machine needs no network, so any rate will do.
    outside_hop = hop(machine.bandwidth_bits_per_s or 1e9, machine.latency_ns)
    between = measured_network(outer, algorithm) if outer else from_hop(machine.name, outside_hop, 2 * machine.workers)
    if inner:
        return between, Nodes(machine.workers, measured_network(inner, algorithm))
    if machine.intra_bandwidth_bits_per_s is None:
        return between, Nodes(machine.workers)
    inside_hop = hop(machine.intra_bandwidth_bits_per_s, machine.intra_latency_ns)
    return between, Nodes(machine.workers, from_hop("inside", inside_hop))


def _host_count(profile: _core.Profile) -> int | None:
    exchange = exchange_of(profile)
    return None if exchange is None else exchange.hosts.count


def _hours(step_ns: float, workers: int, request: Request) -> float:
    return math.ceil(request.worker_steps / workers) * step_ns / 3600e9


def _on_demand(machine: Machine, point: Point, request: Request) -> ClusterOption:
    low, hours, high = (_hours(ns, point.workers, request) for ns in (point.low_ns, point.step_ns, point.high_ns))
    count = point.workers // machine.workers
    return ClusterOption(
        machine=machine.name,
        machines=count,
        workers=point.workers,
        spot=False,
        step_ns=point.step_ns,
        hours=hours,
        low_hours=low,
        high_hours=high,
        sure_hours=hours,
        price_per_hour=count * machine.price_per_hour,
        basis=ON_MEASURED if point.basis == "measured" else PREDICTED,
    )


def _shares(points: dict[int, Point], most: int) -> list[float]:
    """Speed with 1, 2, … machines as a share of that with ``most``; between ``points`` by the number's logarithm."""
    known = sorted(points)
    speeds = []
    for count in range(1, most + 1):
        low = max((each for each in known if each <= count), default=known[0])
        high = min(each for each in known if each >= count)
        part = 0.0 if low >= high else math.log(count / low) / math.log(high / low)
        speeds.append(count * ((1 - part) / points[low].step_ns + part / points[high].step_ns))
    return [speed / speeds[-1] for speed in speeds]


def _on_spot(row: ClusterOption, spot: Spot, point: Point, request: Request, shares: Sequence[float]) -> ClusterOption:
    """``row``: the same cluster without revocations. ``shares``: see _shares.

    With the shortest step nine of ten trainings take longer than ``low_hours``, with the longest step less than
    ``high_hours``. The range is widened to hold the mean, which a few long trainings may move.
    """

    def work_s(step_ns: float) -> float:
        return 3600 * _hours(step_ns, point.workers, request)

    def runs_s(step_ns: float) -> list[float]:
        if spot.elastic:
            runs = simulate_elastic(work_s(step_ns), shares, spot, run_count=request.run_count, seed=request.seed)
            ended = [run for run in runs if run.time_s < math.inf]
            paid.append(sum(run.machine_s for run in ended) / max(sum(run.time_s for run in ended), 1e-9))
            return [run.time_s for run in runs]
        return simulate_s(work_s(step_ns), row.machines, spot, run_count=request.run_count, seed=request.seed)

    paid: list[float] = []  # machines, in the mean over the time
    usual_s = runs_s(point.step_ns)
    hours = mean_s(usual_s, work_s(point.step_ns), spot) / 3600
    sure_hours = max(hours, quantile(usual_s, _CONFIDENCE) / 3600)
    return dataclasses.replace(
        row,
        spot=True,
        hours=hours,
        low_hours=min(hours, quantile(runs_s(point.low_ns), 1 - _CONFIDENCE) / 3600),
        high_hours=max(sure_hours, quantile(runs_s(point.high_ns), _CONFIDENCE) / 3600),
        sure_hours=sure_hours,
        price_per_hour=(paid[0] if paid else row.machines) * spot.price_per_hour,
    )
