"""The published cells, and the time of one iteration of each, from a layer shape and a few named parameters.

Each method is the policy of the C++ core, set as the published runs had it, and played on a modelled network:

- WFBP-A2A: ``fifo``. Horovod with fusion off: one all-reduce per tensor.
- MG-WFBP: ``mgwfbp``, planned with the costs that are written into the program that was run, not with the network that
  is modelled here; then played on the latter.
- BSP-A2A: one all-reduce of everything after backward; the runs set a fusion threshold above either model's size.
- ByteScheduler-A2A: ``bytescheduler`` in overlap mode with a partition of 4 and a credit of 16 million parameters.
"""

import csv
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.replay.models import Model
from gradcast import Block, LinkModel, Plan, Profile, _core, make_plan, play

DATA = Path(__file__).resolve().parent / "data" / "throughput.csv"
# All-reduce methods. The table's other three go through a parameter server, which nothing here models.
METHODS = ("WFBP-A2A", "MG-WFBP", "BSP-A2A", "ByteScheduler-A2A")
# 10 Gbit/s, nothing taken off: with the payload of 1,500-byte frames (94 % of it) BERT-Base on 8 GPUs is out of reach
# even if an operation starts for free.
LINE_RATE_BYTES_PER_S = 1e10 / 8
GPUS_PER_NODE = 4
# The number of GPUs at which operation_ns is stated.
BASE_WORKER_COUNT = 8

BYTESCHEDULER = {"partition_bytes": 4 * 4e6, "credit_bytes": 4 * 16e6}
_PUBLISHED_NAMES = {4: "pcie-4", 8: "10gbe-8", 16: "10gbe-16", 32: "10gbe-32"}
# The program that was run multiplies its start-up cost at 32 GPUs by 3; the bundled value is without the factor.
_MGWFBP_ALPHA_FACTOR = {32: 3.0}


@dataclass(frozen=True)
class Cell:
    model: str
    method: str
    worker_count: int
    batch_size: int  # samples per GPU
    samples_per_s: float  # of all GPUs together
    stddev: float  # of five runs, samples/s
    single_samples_per_s: float  # of one GPU alone

    @property
    def iteration_ns(self) -> float:
        return self.samples_per_s_at(self.samples_per_s)

    @property
    def compute_ns(self) -> float:
        """One iteration of one GPU alone."""
        return 1e9 * self.batch_size / self.single_samples_per_s

    def samples_per_s_at(self, iteration_ns: float) -> float:
        """Samples per second at this time of an iteration, and the other way round."""
        return 1e9 * self.batch_size * self.worker_count / iteration_ns


def load_cells() -> list[Cell]:
    """The all-reduce cells, in the order of the file."""
    with DATA.open(newline="", encoding="utf-8") as file:
        return [
            Cell(
                model=row["model"],
                method=row["method"],
                worker_count=int(row["gpus"]),
                batch_size=int(row["batch_per_gpu"]),
                samples_per_s=float(row["samples_per_s"]),
                stddev=float(row["stddev"]),
                single_samples_per_s=float(row["samples_per_s_1gpu"]),
            )
            for row in csv.DictReader(file)
            if row["method"] in METHODS
        ]


def find(cells: Iterable[Cell], model: str, method: str, worker_count: int) -> Cell:
    return next(c for c in cells if (c.model, c.method, c.worker_count) == (model, method, worker_count))


@dataclass(frozen=True)
class Parameters:
    """What the replay does not know. Everything else is published or comes from the layer shape."""

    # Network between nodes: a ring over all GPUs.
    wire_bytes_per_s: float = LINE_RATE_BYTES_PER_S
    # Start-up cost of one operation at 8 GPUs: latency of the ring and negotiation, which one number of GPUs cannot
    # tell apart.
    operation_ns: float = 0.0
    # Optimizer step that one GPU hides and several do not, per byte of the optimizer's memory traffic.
    update_ns_per_byte: float = 0.0


@dataclass(frozen=True)
class Assumptions:
    """Choices that are not fitted. The defaults are the prediction; the rest shows what each choice is worth."""

    growth: str = "ring"  # how the start-up cost grows from 8 GPUs to more: a key of GROWTHS
    fused_bsp: bool = True
    mgwfbp_knows_network: bool = False  # plans with the modelled network, not with the constants of the run


PREDICTION = Assumptions()

# Start-up cost at P GPUs in any unit; only ratios count.
GROWTHS = {
    "ring": lambda count: float(count - 1),
    "tree": math.log2,
    "nodes": lambda count: float(count // GPUS_PER_NODE - 1),
    "published": lambda count: _published(count).all_reduce.pieces[0].alpha_ns,
    "constant": lambda count: 1.0,
}


def _published(worker_count: int) -> LinkModel:
    return _core.network(_PUBLISHED_NAMES[worker_count]).link


def network(parameters: Parameters, worker_count: int, growth: str = "ring") -> LinkModel:
    """What an all-reduce costs. One node is the published PCIe line: no parameter describes it."""
    if worker_count <= GPUS_PER_NODE:
        return _published(GPUS_PER_NODE)
    grown = GROWTHS[growth](worker_count) / GROWTHS[growth](BASE_WORKER_COUNT)
    latency_ns = parameters.operation_ns * grown / (2 * (worker_count - 1))
    hop = _core.Hop(latency_ns=latency_ns, bandwidth_bytes_per_s=parameters.wire_bytes_per_s)
    return _core.ring_link(hop, worker_count)


def _plan(profile: Profile, link: LinkModel, cell: Cell, assumptions: Assumptions) -> Plan:
    if cell.method == "WFBP-A2A":
        return make_plan(profile, link, policy="fifo", mode="hook")
    if cell.method == "MG-WFBP":
        if not assumptions.mgwfbp_knows_network:
            link = _published(cell.worker_count).scaled(_MGWFBP_ALPHA_FACTOR.get(cell.worker_count, 1.0), 1.0)
        return make_plan(profile, link, policy="mgwfbp", mode="hook")
    if cell.method == "ByteScheduler-A2A":
        return make_plan(profile, link, policy="bytescheduler", mode="overlap", parameters=BYTESCHEDULER)
    return _bsp_plan(profile, assumptions.fused_bsp)


def _bsp_plan(profile: Profile, fused: bool) -> Plan:
    """Everything after backward. Unfused, the block that is ready last goes first, and the others queue behind it."""
    ends = [0, *itertools.accumulate(tensor.bytes for tensor in profile.tensors)]
    spans = [(0, ends[-1])] if fused else list(itertools.pairwise(ends))
    return Plan(blocks=[Block(ranges=[span]) for span in spans], policy="bsp", mode="hook")


def iteration_ns(model: Model, cell: Cell, parameters: Parameters, assumptions: Assumptions = PREDICTION) -> float:
    """The predicted time of one iteration of the cell, ns."""
    profile = model.profile(cell.compute_ns, update_ns_per_byte=parameters.update_ns_per_byte)
    link = network(parameters, cell.worker_count, assumptions.growth)
    return play(profile, link, _plan(profile, link, cell, assumptions)).iteration_ns
