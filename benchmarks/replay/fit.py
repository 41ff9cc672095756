"""The parameters, from cells of WFBP at 4 and 8 GPUs and from nothing else, and what they predict of all cells.

Each parameter is found from the one cell that it moves most, by bisection. That the fitted cells are met says nothing;
the other cells do.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from benchmarks.replay.models import Model, published_models
from benchmarks.replay.predict import (
    BASE_WORKER_COUNT,
    GPUS_PER_NODE,
    PREDICTION,
    Assumptions,
    Cell,
    Parameters,
    find,
    iteration_ns,
    load_cells,
    network,
)
from gradcast import LinkModel, _core
from gradcast.scaling.estimate import Options, band
from gradcast.scaling.growth import Cluster, Network, Nodes, alpha_ns, beta_ns_per_byte, byte_share, step_count

FIT_METHOD = "WFBP-A2A"
RESNET, BERT = FIT_MODELS = ("ResNet-50", "BERT-Base")
FIT_WORKER_COUNTS = (GPUS_PER_NODE, BASE_WORKER_COUNT)
# What is searched, wide enough that only a cell out of reach ends at a border.
RANGES = {"wire_bytes_per_s": (0.1e9, 5e9), "operation_ns": (0.0, 20e6), "update_ns_per_byte": (0.0, 1.0)}
NODES = Nodes(GPUS_PER_NODE)
TARGET = 32  # GPUs, predicted from those of fewer


def bisect(function: Callable[[float], float], low: float, high: float) -> float:
    """Where an increasing function crosses 0, or the end of the range that it stays beyond."""
    if function(low) >= 0:
        return low
    if function(high) <= 0:
        return high
    while high - low > 1e-8 * high:
        middle = (low + high) / 2
        if function(middle) < 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2


@dataclass(frozen=True)
class Result:
    cell: Cell
    samples_per_s: float  # predicted

    @property
    def error(self) -> float:
        return self.samples_per_s / self.cell.samples_per_s - 1

    @property
    def fitted(self) -> bool:
        """Whether the parameters may depend on the cell."""
        cell = self.cell
        return cell.model in FIT_MODELS and cell.method == FIT_METHOD and cell.worker_count in FIT_WORKER_COUNTS

    @property
    def tested(self) -> bool:
        return self.cell.model in FIT_MODELS and not self.fitted


@dataclass(frozen=True)
class Scaled(Result):
    """A prediction for more GPUs than the network is known on, with the ends of its band."""

    slowest: float
    fastest: float

    @property
    def inside(self) -> bool:
        return self.slowest <= self.cell.samples_per_s <= self.fastest


def mean_error(results: Iterable[Result]) -> float:
    """Mean absolute error."""
    errors = [abs(result.error) for result in results]
    return sum(errors) / len(errors)


class Replay:
    def __init__(self, cells: Sequence[Cell] | None = None, models: dict[str, Model] | None = None) -> None:
        self.cells = load_cells() if cells is None else list(cells)
        self.models = models or published_models()

    # --- Fits ---

    def _cell(self, model: str, worker_count: int) -> Cell:
        return find(self.cells, model, FIT_METHOD, worker_count)

    def _excess_ns(self, cell: Cell, parameters: Parameters) -> float:
        return iteration_ns(self.models[cell.model], cell, parameters) - cell.iteration_ns

    def _met(self, name: str, model: str, worker_count: int, parameters: Parameters) -> Parameters:
        """The value of one parameter with which the cell of WFBP is met. All but the wire's make a step longer."""
        sign, cell = -1 if name == "wire_bytes_per_s" else 1, self._cell(model, worker_count)

        def excess_ns(value: float) -> float:
            return sign * self._excess_ns(cell, replace(parameters, **{name: value}))

        return replace(parameters, **{name: bisect(excess_ns, *RANGES[name])})

    def wire_and_start_up(self, worker_count: int, update: Parameters) -> Parameters:
        """From WFBP's two cells of this number of GPUs: many small tensors in one, many bytes in the other.

        A slower start leaves less time for the bytes, so BERT-Base then wants a faster wire: along that curve the
        iteration of ResNet-50, which has more tensors per byte, still gets longer.
        """
        resnet = self._cell(RESNET, worker_count)

        def on_curve(operation_ns: float) -> Parameters:
            return self._met("wire_bytes_per_s", BERT, worker_count, replace(update, operation_ns=operation_ns))

        return on_curve(bisect(lambda value: self._excess_ns(resnet, on_curve(value)), *RANGES["operation_ns"]))

    @cached_property
    def update(self) -> Parameters:
        """Only the update, from BERT-Base on one node."""
        return self._met("update_ns_per_byte", BERT, GPUS_PER_NODE, Parameters())

    @cached_property
    def both(self) -> Parameters:
        return self.wire_and_start_up(BASE_WORKER_COUNT, self.update)

    def from_one(self, model: str) -> Parameters:
        """From the cells of one model; the wire has its line rate. ResNet-50's SGD says nothing of the update."""
        known = self.update if model == BERT else Parameters()
        return self._met("operation_ns", model, BASE_WORKER_COUNT, known)

    # --- Predictions ---

    def results(self, parameters: Parameters, assumptions: Assumptions = PREDICTION) -> list[Result]:
        return [self.result(cell, parameters, assumptions) for cell in self.cells]

    def result(self, cell: Cell, parameters: Parameters, assumptions: Assumptions = PREDICTION) -> Result:
        predicted_ns = iteration_ns(self.models[cell.model], cell, parameters, assumptions)
        return Result(cell, cell.samples_per_s_at(predicted_ns))

    def baseline(self) -> list[Result]:
        """No model at all: per GPU, every method is as fast as WFBP was on 4 GPUs, and on 8 or more as it was on 8."""
        results = []
        for cell in self.cells:
            known = self._cell(cell.model, min(cell.worker_count, BASE_WORKER_COUNT))
            results.append(Result(cell, known.samples_per_s * cell.worker_count / known.worker_count))
        return results

    def variants(self) -> list[tuple[str, Parameters, list[Result]]]:
        """One choice changed, and the parameters fitted again where it touches the fitted cells."""
        both = self.both
        choices = {
            "start-up cost grows like a tree's, log2 P": Assumptions(growth="tree"),
            "start-up cost grows with the nodes, M - 1": Assumptions(growth="nodes"),
            "start-up cost grows like the published start-up costs": Assumptions(growth="published"),
            "start-up cost grows not at all: negotiation only": Assumptions(growth="constant"),
            "BSP sends one operation per tensor": Assumptions(fused_bsp=False),
            "MG-WFBP plans with the modelled network": Assumptions(mgwfbp_knows_network=True),
        }
        found = [(name, both, self.results(both, assumptions)) for name, assumptions in choices.items()]
        for name, model, share in (
            ("ResNet-50: forward is 1/3 of compute", RESNET, 1 / 3),
            ("BERT-Base: forward is 0.4 of compute", BERT, 0.4),
        ):
            changed = self.models | {model: replace(self.models[model], forward_share=share)}
            other = Replay(self.cells, changed)
            found.append((name, other.both, other.results(other.both)))
        line_rate = self._met(
            "operation_ns", RESNET, BASE_WORKER_COUNT, replace(both, wire_bytes_per_s=Parameters().wire_bytes_per_s)
        )
        no_update = replace(both, update_ns_per_byte=0.0)
        named = (("wire at its line rate, 10 Gbit/s", line_rate), ("no time for the update", no_update))
        return found + [(name, parameters, self.results(parameters)) for name, parameters in named]

    # --- Scaling ---

    def known_network(self, worker_counts: Sequence[int]) -> Network:
        """The network by what WFBP's cells of each of these numbers of GPUs say, each by itself."""
        links = [(count, network(self.wire_and_start_up(count, self.update), count)) for count in worker_counts]
        return Network("10GbE", ((GPUS_PER_NODE, _core.network("pcie-4").link), *links))

    def scaled(self, worker_counts: Sequence[int] = (8, 16), target: int = TARGET) -> list[Scaled]:
        """``target`` GPUs from the network of a few."""
        known = self.known_network(worker_counts)
        cells = [cell for cell in self.cells if cell.worker_count == target and cell.model in FIT_MODELS]
        return [
            self.by_band(cell, known) if cell.method == FIT_METHOD else self.by_replay(cell, known) for cell in cells
        ]

    def by_band(self, cell: Cell, known: Network) -> Scaled:
        """As a user of gradcast gets it. REQUIRES: a cell of WFBP."""
        update = self.update.update_ns_per_byte
        profile = self.models[cell.model].profile(cell.compute_ns, update_ns_per_byte=update)
        count = (cell.worker_count,)
        options = Options(count, ("ring",), networks=(known,), nodes=NODES, policy="fifo", mode="hook")
        point = next(point for point in band(profile, options).points if point.workers == cell.worker_count)
        return Scaled(cell, *(cell.samples_per_s_at(ns) for ns in (point.step_ns, point.high_ns, point.low_ns)))

    def by_replay(self, cell: Cell, known: Network) -> Scaled:
        """The methods that are no policy of gradcast by themselves, replayed on the estimated links."""
        estimate = Cluster(known, NODES).estimate("ring", cell.worker_count)
        links = (estimate.link, estimate.high, estimate.low)
        speeds = [self.result(cell, self._on_link(link, cell.worker_count)).samples_per_s for link in links]
        return Scaled(cell, speeds[0], min(speeds), max(speeds))

    def _on_link(self, link: LinkModel, worker_count: int) -> Parameters:
        return replace(
            self.update,
            wire_bytes_per_s=1e9 * byte_share(worker_count) / beta_ns_per_byte(link),
            operation_ns=alpha_ns(link) * step_count("ring", BASE_WORKER_COUNT) / step_count("ring", worker_count),
        )
