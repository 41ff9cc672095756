"""The published measurements: one cell per model, method and number of GPUs."""

import csv
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).resolve().parent / "data"

# All-reduce methods. The table's other three go through a parameter server, which nothing here models.
METHODS = ("WFBP-A2A", "MG-WFBP", "BSP-A2A", "ByteScheduler-A2A")
MODELS = ("ResNet-50", "BERT-Base")
WORKER_COUNTS = (4, 8, 16, 32)
# What the model of the network and of the machine may be fitted on.
FIT_METHOD = "WFBP-A2A"
FIT_WORKER_COUNTS = (4, 8)


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
        return 1e9 * self.batch_size * self.worker_count / self.samples_per_s

    @property
    def compute_ns(self) -> float:
        """One iteration of one GPU alone."""
        return 1e9 * self.batch_size / self.single_samples_per_s

    def samples_per_s_at(self, iteration_ns: float) -> float:
        return 1e9 * self.batch_size * self.worker_count / iteration_ns


def load_cells(name: str = "throughput.csv") -> list[Cell]:
    """The all-reduce cells of one of the files in data/, in its order."""
    with (DATA / name).open(newline="", encoding="utf-8") as file:
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


def find(cells: list[Cell], model: str, method: str, worker_count: int) -> Cell:
    return next(c for c in cells if (c.model, c.method, c.worker_count) == (model, method, worker_count))


def may_fit(cell: Cell) -> bool:
    return cell.method == FIT_METHOD and cell.worker_count in FIT_WORKER_COUNTS
