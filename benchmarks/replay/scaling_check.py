"""Checks `gradcast simulate --scaling` against published throughput: known on 4 to 16 GPUs, predicted on 32.

The network is what WFBP's cells of 8 GPUs and those of 16 say, each by itself: one start-up cost and one cost per byte
from the two models. gradcast.scaling.growth says how they grow to 32 GPUs; the cells of 32 GPUs are not used.
WFBP's cells go through gradcast.scaling.estimate.band from end to end. The other methods were set in
ways that no policy of gradcast is by itself (predict.py), so the replay plans them, on the same link. What went through
a parameter server is left out: nothing here models one.

    python benchmarks/replay/scaling_check.py                             # the table, and what it says
    python benchmarks/replay/scaling_check.py --refresh docs/evaluation/predictions.md   # both in the page
"""

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cells import FIT_METHOD, Cell, load_cells
from fit import RANGES, Fitter, bisect
from models import Model, published_models
from predict import BASE_WORKER_COUNT, GPUS_PER_NODE, Parameters, iteration_ns, network
from tabulate import tabulate

from gradcast import LinkModel, _core
from gradcast.scaling.estimate import Options, band
from gradcast.scaling.growth import (
    Cluster,
    Estimate,
    Growth,
    Network,
    Nodes,
    alpha_ns,
    beta_ns_per_byte,
    byte_share,
    published,
    step_count,
)

TARGET = 32
_NODES = Nodes(GPUS_PER_NODE)


@dataclass(frozen=True)
class Result:
    """Samples per second on 32 GPUs: measured, predicted, and the ends of the band."""

    cell: Cell
    predicted: float
    slowest: float
    fastest: float

    @property
    def error(self) -> float:
        return self.predicted / self.cell.samples_per_s - 1

    @property
    def inside(self) -> bool:
        return self.slowest <= self.cell.samples_per_s <= self.fastest


class ScalingCheck:
    def __init__(self, cells: list[Cell] | None = None) -> None:
        self.models = published_models()
        self.cells = load_cells() if cells is None else cells
        self._fitter = Fitter(self.models, self.cells)
        # As in the replay: what several GPUs lose to the optimizer, from BERT-Base on one node.
        bert = self._fitter.cell("BERT-Base", GPUS_PER_NODE)
        self._update = self._fitter.met("update_ns_per_byte", bert, Parameters())
        self._links: dict[int, LinkModel] = {}

    def link(self, worker_count: int) -> LinkModel:
        """From WFBP's two cells of this number of GPUs: many small tensors in one, many bytes in the other."""
        if worker_count not in self._links:
            self._links[worker_count] = self._fitted_link(worker_count)
        return self._links[worker_count]

    def _fitted_link(self, worker_count: int) -> LinkModel:
        resnet, bert = (self._fitter.cell(model, worker_count) for model in ("ResNet-50", "BERT-Base"))

        def on_curve(operation_ns: float) -> Parameters:
            return self._fitter.met("wire_bytes_per_s", bert, self._update.replace(operation_ns=operation_ns))

        def excess_ns(operation_ns: float) -> float:
            predicted = iteration_ns(self.models["ResNet-50"], resnet, on_curve(operation_ns))
            return predicted - resnet.iteration_ns

        return network(on_curve(bisect(excess_ns, *RANGES["operation_ns"])), worker_count)

    def network(self, worker_counts: Sequence[int]) -> Network:
        known = [(GPUS_PER_NODE, _core.network("pcie-4").link)]
        return Network("10GbE", tuple(known + [(count, self.link(count)) for count in worker_counts]))

    def results(self, worker_counts: Sequence[int] = (8, 16), target: int = TARGET) -> list[Result]:
        """``target`` GPUs from the network of a few."""
        network = self.network(worker_counts)
        cells = [cell for cell in self.cells if cell.worker_count == target]
        estimate = Cluster(network, _NODES).estimate("ring", target)
        return [
            self.of_band(cell, network) if cell.method == FIT_METHOD else self.of_replay(cell, estimate)
            for cell in cells
        ]

    def of_band(self, cell: Cell, network: Network) -> Result:
        """As a user of ``gradcast simulate --scaling`` gets it. REQUIRES: a cell of WFBP."""
        model = self.models[cell.model]
        profile = model.profile(cell.compute_ns, update_ns_per_byte=self._update.update_ns_per_byte)
        options = Options(
            workers=(cell.worker_count,),
            algorithms=("ring",),
            networks=(network,),
            nodes=_NODES,
            policy="fifo",
            mode="hook",
        )
        point = next(point for point in band(profile, options).points if point.workers == cell.worker_count)
        return Result(cell, *(cell.samples_per_s_at(ns) for ns in (point.step_ns, point.high_ns, point.low_ns)))

    def of_replay(self, cell: Cell, estimate: Estimate) -> Result:
        links = (estimate.link, estimate.high, estimate.low)
        speeds = [self._samples_per_s(self.models[cell.model], cell, link) for link in links]
        return Result(cell, speeds[0], min(speeds), max(speeds))

    def _samples_per_s(self, model: Model, cell: Cell, link: LinkModel) -> float:
        """As the replay predicts a cell, on this link, given as the replay's parameters."""
        count = cell.worker_count
        parameters = self._update.replace(
            wire_bytes_per_s=1e9 * byte_share(count) / beta_ns_per_byte(link),
            operation_ns=alpha_ns(link) * step_count("ring", BASE_WORKER_COUNT) / step_count("ring", count),
        )
        return cell.samples_per_s_at(iteration_ns(model, cell, parameters))


def mean_error(results: Sequence[Result]) -> float:
    return sum(abs(result.error) for result in results) / len(results)


def without_bytescheduler(results: Sequence[Result]) -> list[Result]:
    return [result for result in results if not result.cell.method.startswith("ByteScheduler")]


def table(check: ScalingCheck) -> str:
    results = check.results()
    rows = [
        [
            result.cell.model,
            result.cell.method,
            f"{result.cell.samples_per_s:.1f}",
            f"{result.predicted:.1f}",
            f"{result.slowest:.0f} to {result.fastest:.0f}",
            f"{100 * result.error:+.1f}",
            "yes" if result.inside else "no",
        ]
        for result in results
    ]
    rows.append(["mean absolute", "", "", "", "", f"{100 * mean_error(results):.1f}", _inside(results)])
    rest = without_bytescheduler(results)
    rows.append(["mean absolute", "all but ByteScheduler", "", "", "", f"{100 * mean_error(rest):.1f}", _inside(rest)])
    headers = ["model", "method", "measured/s", "predicted/s", "band", "error %", "in the band"]
    align = ["left", "left", "right", "right", "right", "right", "right"]
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True, colalign=align)


def _inside(results: Sequence[Result]) -> str:
    return f"{sum(result.inside for result in results)} of {len(results)}"


def sentences(check: ScalingCheck) -> str:
    known_on_8 = [check.results((8,), target) for target in (TARGET, 16)]
    errors = [f"{100 * mean_error(results):.1f} %" for results in known_on_8]
    missed = sum(not result.inside for result in check.results())
    return (
        f"The bands, which are about the network only, miss {missed} cells. Known on 8 GPUs alone, 32 are off by "
        f"{errors[0]} and {_inside(known_on_8[0])} are in the band, 16 by {errors[1]} and {_inside(known_on_8[1])}."
    )


def start_ups() -> str:
    """The published start-up costs of that network: those of more workers from those of few."""
    costs = published("10gbe").costs
    rows = []
    for known_count in range(1, len(costs)):
        growth = Growth(Network("10GbE", costs[:known_count]))
        for count, link in costs[known_count:]:
            estimate = growth.estimate("ring", count)
            low, middle, high = (alpha_ns(each) for each in (estimate.low, estimate.link, estimate.high))
            known = ", ".join(str(known) for known, _ in costs[:known_count])
            inside = "yes" if low <= alpha_ns(link) <= high else "no"
            rows.append([known, count, *(f"{ns / 1e3:.0f}" for ns in (alpha_ns(link), middle, low, high)), inside])
    headers = ["known on", "workers", "published, us", "predicted, us", "least, us", "most, us", "in the range"]
    align = ["left"] + ["right"] * 6
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True, colalign=align)


def block(check: ScalingCheck) -> str:
    return (
        f"{table(check)}\n\n{sentences(check)}\n\nThe published start-up costs of that network alone:\n\n{start_ups()}"
    )


def marked(text: str) -> str:
    return f"<!-- scaling:check -->\n{text}\n<!-- /scaling:check -->"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--refresh", metavar="PAGE", help="renew the table and what it says in docs/evaluation/predictions.md"
    )
    args = parser.parse_args(arguments)
    text = block(ScalingCheck())
    if args.refresh:
        page = Path(args.refresh)
        pattern = re.compile(r"<!-- scaling:check -->\n.*?<!-- /scaling:check -->", re.DOTALL)
        page.write_text(pattern.sub(lambda _: marked(text), page.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
