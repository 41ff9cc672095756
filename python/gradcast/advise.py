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
from gradcast.growth import SPREAD, Network, Nodes, from_hop
from gradcast.prices import Machine, Prices
from gradcast.scaling import Options, Point, band, measured_network
from gradcast.spot import Spot, quantile, simulate_s

# A spot training that is said to end in time does so nine times out of ten.
_SURE = 0.9
_INTRA = "inside"


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
    sure_hours: float  # of a spot cluster what nine of ten trainings do not exceed
    price_per_hour: float  # of the cluster
    basis: str  # "measured" or "predicted"

    @property
    def cost(self) -> float:
        return self.hours * self.price_per_hour

    @property
    def sure_cost(self) -> float:
        return self.sure_hours * self.price_per_hour

    def describe(self) -> str:
        return f"{self.machines} x {self.machine}{' (spot)' if self.spot else ''}"


@dataclass(frozen=True)
class Advice:
    rows: tuple[Row, ...]  # the fastest first
    frontier: tuple[Row, ...]  # no other row is both faster and cheaper

    def cheapest_within(self, hours: float) -> Row | None:
        return min((row for row in self.rows if row.sure_hours <= hours), key=lambda row: row.cost, default=None)

    def fastest_within(self, cost: float) -> Row | None:
        return min((row for row in self.rows if row.sure_cost <= cost), key=lambda row: row.hours, default=None)


def advise(profiles: Sequence[_core.Profile], prices: Prices, request: Request) -> Advice:
    """``profiles``: of one model, as for ``scaling.band``."""
    names = [machine.name for machine in prices.machines]
    if request.measured_on is not None and request.measured_on not in names:
        raise Error(f"{prices.source} has no machine {request.measured_on}; it has {', '.join(names)}")
    # Speeds are relative: to the machine that was profiled, or to 1 where nobody says which one it was.
    base = next((machine.speed for machine in prices.machines if machine.name == request.measured_on), 1.0)
    machines = [dataclasses.replace(machine, speed=machine.speed / base) for machine in prices.machines]
    found = [row for machine in machines for row in _machine_rows(profiles, machine, request)]
    rows = tuple(sorted((row for row in found if row.hours < math.inf), key=lambda row: (row.hours, row.cost)))
    if not rows:
        raise Error("no cluster of the price file ever gets this training done: machines are revoked too often")
    return Advice(rows, frontier(rows))


def frontier(rows: Sequence[Row]) -> tuple[Row, ...]:
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


def _machine_rows(profiles: Sequence[_core.Profile], machine: Machine, request: Request) -> list[Row]:
    measured = machine.name == request.measured_on
    world_sizes = [profile.world_size for profile in profiles] if measured else []
    rows: list[Row] = []
    for point in _points(profiles, machine, request, world_sizes):
        known = point.workers in world_sizes and (point.basis == "measured" or point.workers == 1)
        basis = "measured" if known else "predicted"
        rows.append(_on_demand(machine, point, request.training, basis))
        if machine.spot is not None:
            # Revocations are drawn, not measured.
            rows.append(_on_spot(machine, machine.spot, point, request))
    return rows


def _points(
    profiles: Sequence[_core.Profile], machine: Machine, request: Request, world_sizes: Sequence[int]
) -> list[Point]:
    counts = [count * machine.workers for count in machine_counts(machine, world_sizes)]
    network, nodes = _network(profiles if world_sizes else [], machine)
    options = Options(
        workers=tuple(counts),
        algorithms=(request.algorithm,),
        networks=(network,),
        nodes=nodes,
        spread=request.spread,
        policy=request.policy,
        mode=request.mode,
    )
    own = [scaled_profile(profile, 1 / machine.speed) for profile in profiles]
    return [point for point in band(own, options).points if point.workers in counts]


def _network(measured: Sequence[_core.Profile], machine: Machine) -> tuple[Network, Nodes]:
    """Between machines and inside one: what was measured there, and the price file for the rest."""
    linked = [profile for profile in measured if profile.world_size > 1 and profile.link is not None]
    inner = [profile for profile in linked if profile.world_size <= machine.workers]
    outer = [profile for profile in linked if profile.world_size > machine.workers]
    inside = measured_network(inner) if inner else _inside(machine)
    return measured_network(outer) if outer else _between(machine), Nodes(machine.workers, inside)


def _between(machine: Machine) -> Network:
    # A single machine needs no network; one of any rate stands for it.
    bandwidth = machine.bandwidth_bits_per_s or 1e9
    hop = _core.Hop(latency_ns=machine.latency_ns, bandwidth_bytes_per_s=bandwidth / 8)
    return from_hop(machine.name, hop, 2 * machine.workers)


def _inside(machine: Machine) -> Network | None:
    if machine.intra_bandwidth_bits_per_s is None:
        return None
    bandwidth = machine.intra_bandwidth_bits_per_s
    hop = _core.Hop(latency_ns=machine.intra_latency_ns, bandwidth_bytes_per_s=bandwidth / 8)
    return from_hop(_INTRA, hop, 2)


def _hours(step_ns: float, workers: int, training: Training) -> float:
    return math.ceil(training.worker_steps / workers) * step_ns / 3600e9


def _on_demand(machine: Machine, point: Point, training: Training, basis: str) -> Row:
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
        basis=basis,
    )


def _on_spot(machine: Machine, spot: Spot, point: Point, request: Request) -> Row:
    """Its range: nine of ten trainings at the lowest step take longer, nine of ten at the highest one less."""
    count = point.workers // machine.workers

    def runs(step_ns: float) -> list[float]:
        work_s = 3600 * _hours(step_ns, point.workers, request.training)
        found = simulate_s(work_s, count, spot, run_count=request.run_count, seed=request.seed)
        return [time_s / 3600 for time_s in found]

    usual = runs(point.step_ns)
    return Row(
        machine=machine.name,
        machines=count,
        workers=point.workers,
        spot=True,
        step_ns=point.step_ns,
        hours=sum(usual) / len(usual),
        low_hours=quantile(runs(point.low_ns), 1 - _SURE),
        high_hours=quantile(runs(point.high_ns), _SURE),
        sure_hours=quantile(usual, _SURE),
        price_per_hour=count * spot.price_per_hour,
        basis="predicted",
    )
