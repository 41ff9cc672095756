"""The cost of an all-reduce on other numbers of workers, from its known costs.

This inverts the formulas of docs/reference/networks.md: a start-up cost is the number of steps times the latency of a
hop, plus a constant; a cost per byte is 2 (P - 1) / P over the bandwidth. Ambiguous measurements give a range.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from gradcast import _core
from gradcast.errors import Error

ALGORITHMS = ("ring", "tree", "hierarchical")
MEASURED_ALGORITHMS = ("ring", "tree")  # that a library may have used when costs were measured
# One in 200 simulated fits of a link was off by 12 % at its worst size, the median by 2.5 %
# (docs/reference/networks.md).
SPREAD = 0.1
# Other ways in which a start-up cost may grow: not at all, or, if all measured blocks had one size, with their bytes.
_CONSTANT, _BYTES = "constant", "bytes"
# Published networks whose costs per byte were scaled from another number of workers (docs/reference/networks.md).
_SCALED = ("56gbib-32", "56gbib-64")


def step_count(algorithm: str, worker_count: int) -> float:
    """Returns the number of successive messages of an all-reduce; each waits for the latency of a hop."""
    if algorithm == _CONSTANT:
        return 0
    if algorithm == _BYTES:
        return byte_share(worker_count)
    # Between nodes a hierarchical all-reduce is a ring.
    return 2 * math.ceil(math.log2(worker_count)) if algorithm == "tree" else 2 * (worker_count - 1)


def byte_share(worker_count: int) -> float:
    """Returns the passes of each byte over a worker's connection, in a ring or a tree."""
    return 2 * (worker_count - 1) / worker_count


@dataclass(frozen=True)
class Network:
    """A network by its known costs: (number of workers, link), ascending."""

    name: str
    costs: tuple[tuple[int, _core.LinkModel], ...]
    algorithm: str = "ring"  # that was used when the costs were measured
    measured: bool = True  # False: costs of a formula, which also tells how they grow
    scaled: bool = False  # from the costs of another number of workers

    def __post_init__(self) -> None:
        if self.algorithm not in MEASURED_ALGORITHMS:
            raise Error(f"costs cannot be measured with {self.algorithm}; write {' or '.join(MEASURED_ALGORITHMS)}")


@dataclass(frozen=True)
class Nodes:
    workers_per_node: int
    inside: Network | None = None  # None: the network's costs for at most workers_per_node workers


@dataclass(frozen=True)
class Estimate:
    """The link of a number of workers, with the cheapest and the most expensive link that the measurements allow."""

    low: _core.LinkModel
    link: _core.LinkModel
    high: _core.LinkModel
    basis: str  # "measured", "fitted" or "extrapolated"


_FREE = _core.LinkModel(all_reduce=[_core.LinkPiece(alpha_ns=0, beta_ns_per_byte=0)])
_ALONE = Estimate(_FREE, _FREE, _FREE, "extrapolated")  # one worker sends nothing


@dataclass(frozen=True)
class StartUp:
    fixed_ns: float
    hop_ns: float
    error_share: float  # largest relative error at the known costs

    def at(self, algorithm: str, worker_count: int) -> float:
        return self.fixed_ns + self.hop_ns * step_count(algorithm, worker_count)


def alpha_ns(link: _core.LinkModel) -> float:
    return link.all_reduce.pieces[0].alpha_ns


def beta_ns_per_byte(link: _core.LinkModel) -> float:
    return link.all_reduce.pieces[-1].beta_ns_per_byte


def fit_start_up(algorithm: str, known: list[tuple[int, float]]) -> StartUp:
    """Least squares of relative errors, both parts at least 0. ``known``: (workers, ns); a single one is all steps."""
    rows = [(1 / value, step_count(algorithm, count) / value) for count, value in known if value > 0]
    if not rows:
        return StartUp(0.0, 0.0, 0.0)
    ones, steps = sum(a * a for a, _ in rows), sum(b * b for _, b in rows)
    mixed, one, step = sum(a * b for a, b in rows), sum(a for a, _ in rows), sum(b for _, b in rows)
    candidates = [(one / ones, 0.0)]
    if steps > 0:
        candidates.append((0.0, step / steps))
    determinant = ones * steps - mixed * mixed
    if len(rows) > 1 and determinant > 1e-9 * ones * steps:
        both = ((one * steps - step * mixed) / determinant, (step * ones - one * mixed) / determinant)
        candidates += [both] if min(both) >= 0 else []
    elif steps > 0:
        candidates = candidates[1:]

    def errors(candidate: tuple[float, float]) -> list[float]:
        return [abs(a * candidate[0] + b * candidate[1] - 1) for a, b in rows]

    best = min(candidates, key=lambda candidate: sum(error**2 for error in errors(candidate)))
    return StartUp(*best, max(errors(best)))


def corners(known: list[tuple[int, float]], share: float) -> Iterator[list[tuple[int, float]]]:
    """Variants of ``known`` ((workers, value), ascending), each value changed by ``share``, with a fit's extremes.

    The weight of a value in a fitted line changes its sign at most once along the numbers of workers.
    """
    for split in range(len(known) + 1):
        for sign in (-1, 1):
            factors = [1 - sign * share] * split + [1 + sign * share] * (len(known) - split)
            yield [(count, value * max(factor, 0.0)) for (count, value), factor in zip(known, factors, strict=True)]


def _scaled(link: _core.LinkModel, to_alpha_ns: float, to_beta_ns_per_byte: float) -> _core.LinkModel:
    """The link with other costs, and all-reduces only, as measured and hierarchical links have. A cost of 0 stays 0."""
    alpha, beta = alpha_ns(link), beta_ns_per_byte(link)
    factors = (to_alpha_ns / alpha if alpha > 0 else 1.0, to_beta_ns_per_byte / beta if beta > 0 else 1.0)
    only = _core.LinkModel(all_reduce=link.all_reduce.pieces, pack_ns_per_byte=link.pack_ns_per_byte)
    scaled = only.scaled(*factors)
    # A start-up cost of 0 cannot be scaled, so the new one is added.
    return scaled if alpha > 0 else _sum(scaled, _line(to_alpha_ns, 0.0))


def _line(alpha_ns: float, beta_ns_per_byte: float) -> _core.LinkModel:
    return _core.LinkModel(all_reduce=[_core.LinkPiece(alpha_ns=alpha_ns, beta_ns_per_byte=beta_ns_per_byte)])


def _sum(link: _core.LinkModel, other: _core.LinkModel) -> _core.LinkModel:
    """The costs of two operations one after the other, such as all-reduces inside nodes and between them."""
    costs = [link.all_reduce.pieces, other.all_reduce.pieces]
    ends = sorted({piece.up_to_bytes for pieces in costs for piece in pieces if piece.up_to_bytes is not None})
    found = []
    for end in [*ends, None]:
        # The first piece of each cost that reaches this far.
        parts = [next(p for p in pieces if p.up_to_bytes is None or (end and p.up_to_bytes >= end)) for pieces in costs]
        found.append(
            _core.LinkPiece(
                alpha_ns=sum(part.alpha_ns for part in parts),
                beta_ns_per_byte=sum(part.beta_ns_per_byte for part in parts),
                up_to_bytes=end,
            )
        )
    # A block is packed once for both operations.
    return _core.LinkModel(all_reduce=found, pack_ns_per_byte=max(link.pack_ns_per_byte, other.pack_ns_per_byte))


class Growth:
    def __init__(self, network: Network, spread: float = SPREAD) -> None:
        if not network.costs:
            raise Error(f"the network {network.name} has no costs; give those of at least one number of workers")
        self.network = network
        self._spread = spread
        self._costs = dict(network.costs)
        self._alphas = [(count, alpha_ns(link)) for count, link in network.costs]
        shares = [beta_ns_per_byte(link) / byte_share(count) for count, link in network.costs]
        if 0 in shares and max(shares) > 0:
            without = " and ".join(str(count) for count, share in zip(self._costs, shares, strict=True) if share == 0)
            raise Error(
                f"the network {network.name} has no cost per byte on {without} workers, because the blocks measured "
                "there had too few sizes, and has one elsewhere; omit the costs without one"
            )
        self._wire_ns_per_byte = sum(shares) / len(shares)
        # Largest relative deviation of the measurements from their mean.
        self._wire_error = max((abs(share / self._wire_ns_per_byte - 1) for share in shares if share > 0), default=0.0)

    def estimate(self, algorithm: str, worker_count: int) -> Estimate:
        """Returns the link if each worker is a node of its own. REQUIRES: more than one worker."""
        basis = self._basis(algorithm, worker_count)
        # The link of the nearest number of workers gives the shape: breakpoints and packing.
        base = self._costs[min(self._costs, key=lambda count: (abs(math.log(count / worker_count)), -count))]
        if basis == "measured":
            alpha, beta, wire = alpha_ns(base), beta_ns_per_byte(base), self._spread
            low, middle, high = alpha * (1 - self._spread), alpha, alpha * (1 + self._spread)
        else:
            low, middle, high = self._alphas_ns(algorithm, worker_count)
            beta = self._wire_ns_per_byte * byte_share(worker_count)
            wire = max(self._spread, self._wire_error)
        return Estimate(
            low=_scaled(base, low, beta * max(1 - wire, 0.0)),
            link=_scaled(base, middle, beta),
            high=_scaled(base, high, beta * (1 + wire)),
            basis=basis,
        )

    def _basis(self, algorithm: str, worker_count: int) -> str:
        if algorithm != self.network.algorithm or not self.network.measured or self.network.scaled:
            return "extrapolated"
        if worker_count in self._costs:
            return "measured"
        return "fitted" if min(self._costs) < worker_count < max(self._costs) else "extrapolated"

    def _alphas_ns(self, algorithm: str, worker_count: int) -> tuple[float, float, float]:
        """Returns the lowest, estimated and highest start-up cost: of inaccurate ones, and of other growth."""
        own = self.network.algorithm
        share = max(self._spread, fit_start_up(own, self._alphas).error_share)
        ways = [(own, algorithm)]  # the algorithm of the known costs, and that of the estimate
        if self.network.measured:
            # With blocks of one size, start-up cost and bytes are not separable (training.measure.network_cost).
            ways = [(_BYTES, _BYTES), *ways] if self._wire_ns_per_byte == 0 else ways
            # It may consist of the requested algorithm's steps, or of no steps, or grow more slowly than a ring's.
            others = [(algorithm, algorithm), (_CONSTANT, _CONSTANT)]
            others += [("tree", "tree")] if algorithm == "ring" else []
            # Several measurements rule out some of these ways.
            ways += [way for way in others if fit_start_up(way[0], self._alphas).error_share <= share]

        def at(way: tuple[str, str], known: list[tuple[int, float]]) -> float:
            return fit_start_up(way[0], known).at(way[1], worker_count)

        found = [at(way, known) for way in ways for known in corners(self._alphas, share)]
        return min(found), at(ways[0], self._alphas), max(found)


class Cluster:
    def __init__(self, network: Network, nodes: Nodes | None = None, spread: float = SPREAD) -> None:
        self.network = network
        self._per_node = nodes.workers_per_node if nodes else 1
        inner = [cost for cost in network.costs if cost[0] <= self._per_node]
        outer = [cost for cost in network.costs if cost[0] > self._per_node]
        inside = nodes.inside if nodes and nodes.inside else self._part(inner)
        self._inside = Growth(inside, spread) if inside.costs else None
        self._between = Growth(self._part(outer), spread) if outer else None

    def _part(self, costs: list[tuple[int, _core.LinkModel]]) -> Network:
        return dataclasses.replace(self.network, costs=tuple(costs))

    def why_not(self, algorithm: str, worker_count: int) -> str | None:
        """Returns the reason why there is no estimate, or None if there is one."""
        inside = worker_count <= self._per_node
        hierarchical = algorithm == "hierarchical" and not inside
        if worker_count == 1:
            return None
        if not inside and self._between is None:
            return "the costs of the network between nodes are not known"
        if hierarchical and self._per_node == 1:
            return "a hierarchical all-reduce needs nodes of several workers"
        if (inside or hierarchical) and self._inside is None:
            return "the costs of the network inside a node are not known"
        if hierarchical and worker_count % self._per_node:
            return f"{worker_count} workers do not fill nodes of {self._per_node} workers"
        return None

    def estimate(self, algorithm: str, worker_count: int) -> Estimate:
        """Returns the link of this number of workers. REQUIRES: why_not is None."""
        if worker_count == 1:
            return _ALONE
        if worker_count <= self._per_node:
            # Inside one node a hierarchical all-reduce is a ring.
            return self._inside.estimate("ring" if algorithm == "hierarchical" else algorithm, worker_count)
        if algorithm == "hierarchical":
            outer = self._between.estimate("hierarchical", worker_count // self._per_node)
            inner = self._inside.estimate("ring", self._per_node)
            sums = (_sum(outer.low, inner.low), _sum(outer.link, inner.link), _sum(outer.high, inner.high))
            return Estimate(*sums, "extrapolated")
        return self._between.estimate(algorithm, worker_count)


def published(name: str, algorithm: str = "ring") -> Network:
    """A bundled network: ``10gbe-8`` is one number of workers, ``10gbe`` all those on which it was measured."""
    family = [named for named in _core.networks() if named.name.rpartition("-")[0] == name]
    found = [named for named in family if named.name not in _SCALED] or [_core.network(name)]
    costs = sorted(((named.world_size, named.link) for named in found), key=lambda cost: cost[0])
    return Network(name, tuple(costs), algorithm, scaled=name in _SCALED)


def hop(bandwidth_bits_per_s: float, latency_ns: float) -> _core.Hop:
    return _core.Hop(latency_ns=latency_ns, bandwidth_bytes_per_s=bandwidth_bits_per_s / 8)


def from_hop(name: str, hop: _core.Hop, worker_count: int = 2) -> Network:
    """A network of equal connections by the formula. Any ``worker_count`` above 1 gives the same network."""
    return Network(name, ((worker_count, _core.ring_link(hop, worker_count)),), measured=False)
