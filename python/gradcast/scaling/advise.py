"""Which machines to rent, and how many: the cheapest within a time, the fastest within a cost, and all between them.

The recommendation of Stash (A. Sharma et al., arXiv:2208.14344), which takes a measured step on each kind of machine;
here steps that were not measured are predicted (scaling.py), and each row says which.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from gradcast import _core
from gradcast.errors import Error
from gradcast.files import scaled_profile
from gradcast.scaling.estimate import Band, Options, Point, band, measured_network
from gradcast.scaling.growth import SPREAD, Network, Nodes, from_hop, hop
from gradcast.scaling.prices import Machine, Prices
from gradcast.scaling.spot import GIVEN_UP, Spot, mean_s, quantile, simulate_s

# A spot training that is said to end in time does so nine times out of ten.
_SURE = 0.9
_INTRA = "inside"
PREDICTED, ON_MEASURED = "predicted", "predicted on measured costs"


@dataclass(frozen=True)
class Training:
    """``worker_steps``: steps of one worker, each of one batch; of all workers together."""

    worker_steps: float

    @staticmethod
    def of_samples(sample_count: float, batch_size: int) -> "Training":
        """``batch_size``: of one worker, as it was profiled."""
        return Training(sample_count / batch_size)

    @staticmethod
    def of_steps(step_count: int, worker_count: int) -> "Training":
        """As many samples as that many steps of that many workers see."""
        return Training(float(step_count) * worker_count)


@dataclass(frozen=True)
class Request:
    training: Training
    measured_on: str | None = None  # the machine on which the profiles were measured
    measured_algorithm: str = "ring"  # what the library ran then
    algorithm: str = "ring"
    policy: str = _core.DEFAULT_POLICY
    mode: str = "overlap"
    spread: float = SPREAD
    run_count: int = 300  # of each spot cluster: a tenth of them is beyond a quantile of 0.9
    seed: int = 1


@dataclass(frozen=True)
class Row:
    """One cluster. Times in hours, costs in the currency of the price file, for the whole training."""

    machine: str
    machines: int
    workers: int
    spot: bool
    step_ns: float
    hours: float  # of a spot cluster the mean
    low_hours: float
    high_hours: float
    sure_hours: float  # of a spot cluster what nine of ten trainings do not exceed, and no less than the mean
    price_per_hour: float  # of the cluster
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
    rows: tuple[Row, ...]  # the fastest first
    frontier: tuple[Row, ...]  # no other row is both faster and cheaper
    skipped: dict[str, str]  # clusters that are no row, and why

    def cheapest_within(self, hours: float) -> Row | None:
        return min((row for row in self.rows if row.sure_hours <= hours), key=lambda row: row.cost, default=None)

    def fastest_within(self, cost: float) -> Row | None:
        return min((row for row in self.rows if row.sure_cost <= cost), key=lambda row: row.hours, default=None)


def advise(profiles: Sequence[_core.Profile], prices: Prices, request: Request) -> Advice:
    """``profiles``: of one model, as for ``scaling.band``."""
    names = [machine.name for machine in prices.machines]
    if request.measured_on is not None and request.measured_on not in names:
        raise Error(f"{prices.path} has no machine {request.measured_on}; it has {', '.join(names)}")
    # Speeds are relative: to the machine that was profiled, or to 1 where nobody says which one it was.
    base = next((machine.speed for machine in prices.machines if machine.name == request.measured_on), 1.0)
    machines = [dataclasses.replace(machine, speed=machine.speed / base) for machine in prices.machines]
    found: list[Row] = []
    skipped: dict[str, str] = {}
    for machine in machines:
        rows, missing = _machine_rows(profiles, machine, request)
        found += rows
        skipped |= missing
    found.sort(key=lambda row: (row.hours, row.cost))
    return Advice(tuple(found), pareto_rows(found), skipped)


def pareto_rows(rows: Sequence[Row]) -> tuple[Row, ...]:
    """``rows``: by time."""
    found: list[Row] = []
    for row in rows:
        if not found or row.cost < found[-1].cost:
            found.append(row)
    return tuple(found)


def machine_counts(machine: Machine, world_sizes: Sequence[int] = ()) -> list[int]:
    """1, 2, 4 … and the most there are; and those that the measured numbers of workers fill."""
    counts = {2**k for k in range(machine.max_machines.bit_length())} | {machine.max_machines}
    counts |= {size // machine.workers for size in world_sizes if size % machine.workers == 0}
    return sorted(count for count in counts if 1 <= count <= machine.max_machines)


def _cluster(machine: str, machine_count: int, spot: bool) -> str:
    return f"{machine_count} x {machine}{' (spot)' if spot else ''}"


def _machine_rows(
    profiles: Sequence[_core.Profile], machine: Machine, request: Request
) -> tuple[list[Row], dict[str, str]]:
    """And which clusters are left out, and why."""
    counts = machine_counts(machine, [p.world_size for p in profiles] if machine.name == request.measured_on else [])
    found = _band(profiles, machine, request, counts)
    points = {point.workers // machine.workers: point for point in found.points if point.workers % machine.workers == 0}
    rows: list[Row] = []
    skipped: dict[str, str] = {}
    for count in counts:
        if count not in points:
            # There is one network and one algorithm, and what is missing is missing for one reason.
            skipped[_cluster(machine.name, count, False)] = next(iter(found.skipped.values()))
            continue
        rows.append(_on_demand(machine, points[count], request.training))
        if machine.spot is None:
            continue
        row = _on_spot(machine, machine.spot, points[count], request)
        if row.hours < math.inf:
            rows.append(row)
        else:
            skipped[row.describe()] = f"revocations make the training {GIVEN_UP} times as long or more"
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
        mode=request.mode,
    )
    return band([scaled_profile(profile, 1 / machine.speed) for profile in profiles], options)


def _network(measured: Sequence[_core.Profile], machine: Machine, request: Request) -> tuple[Network, Nodes]:
    """Between machines and inside one: what was measured there, and the price file for the rest. A profile does not say
    how its ranks were spread: where one machine holds them all, it is taken for one."""
    linked = [profile for profile in measured if profile.world_size > 1 and profile.link is not None]
    inner = [profile for profile in linked if profile.world_size <= machine.workers]
    outer = [profile for profile in linked if profile.world_size > machine.workers]
    algorithm = request.measured_algorithm
    inside = measured_network(inner, algorithm) if inner else _inside(machine)
    between = measured_network(outer, algorithm) if outer else _between(machine)
    return between, Nodes(machine.workers, inside)


def _between(machine: Machine) -> Network:
    # A single machine needs no network; one of any rate stands for it.
    bandwidth_bits_per_s = machine.bandwidth_bits_per_s or 1e9
    return from_hop(machine.name, hop(bandwidth_bits_per_s, machine.latency_ns), 2 * machine.workers)


def _inside(machine: Machine) -> Network | None:
    if machine.intra_bandwidth_bits_per_s is None:
        return None
    return from_hop(_INTRA, hop(machine.intra_bandwidth_bits_per_s, machine.intra_latency_ns), 2)


def _hours(step_ns: float, workers: int, training: Training) -> float:
    return math.ceil(training.worker_steps / workers) * step_ns / 3600e9


def _basis(point: Point) -> str:
    return ON_MEASURED if point.basis == "measured" else PREDICTED


def _on_demand(machine: Machine, point: Point, training: Training) -> Row:
    low, hours, high = (_hours(ns, point.workers, training) for ns in (point.low_ns, point.step_ns, point.high_ns))
    count = point.workers // machine.workers
    return Row(
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
        basis=_basis(point),
    )


def _on_spot(machine: Machine, spot: Spot, point: Point, request: Request) -> Row:
    """Its range: nine of ten trainings at the lowest step take longer, nine of ten at the highest one less; and the
    mean, which a few long ones may have moved out of it."""
    count = point.workers // machine.workers

    def work_s(step_ns: float) -> float:
        return 3600 * _hours(step_ns, point.workers, request.training)

    def runs_s(step_ns: float) -> list[float]:
        return simulate_s(work_s(step_ns), count, spot, run_count=request.run_count, seed=request.seed)

    usual_s = runs_s(point.step_ns)
    hours = mean_s(usual_s, work_s(point.step_ns), spot) / 3600
    sure_hours = max(hours, quantile(usual_s, _SURE) / 3600)
    return Row(
        machine=machine.name,
        machines=count,
        workers=point.workers,
        spot=True,
        step_ns=point.step_ns,
        hours=hours,
        low_hours=min(hours, quantile(runs_s(point.low_ns), 1 - _SURE) / 3600),
        high_hours=max(sure_hours, quantile(runs_s(point.high_ns), _SURE) / 3600),
        sure_hours=sure_hours,
        price_per_hour=count * spot.price_per_hour,
        basis=_basis(point),
    )
