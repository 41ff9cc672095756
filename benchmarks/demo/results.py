"""From what rank 0 measured to the table: one row per mode."""

import statistics
from dataclasses import dataclass
from typing import Any

from benchmarks.demo.modes import MODES
from gradcast.lab.variants import COMPUTE

# With two ranks a sum has two numbers, whose order does not matter: every mode adds the same bits, and any difference
# would be a wrong number. This much could come from an arithmetic that rounds otherwise; more is an error.
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Row:
    mode: str
    step_ms: float  # median
    low_ms: float  # a tenth of the steps is faster
    high_ms: float  # a tenth is slower
    exposed_ms: float  # the median step less the median step without communication
    accuracy: float | None  # of held-out images at the end
    difference: float | None  # the largest of a parameter to DDP's, at the end of any round, on any rank


def rows(results: dict[str, Any]) -> list[Row]:
    rounds = results["rounds"]
    # gradcast measures the model in the first round, and DDP lays out its buckets.
    steps = {mode: [ms for entry in rounds[1:] for ms in entry["steps_ms"][mode]] for mode in rounds[0]["steps_ms"]}
    compute_ms = statistics.median(steps[COMPUTE])
    return [_row(mode, steps[mode], compute_ms, results) for mode in steps]


def _row(mode: str, steps_ms: list[float], compute_ms: float, results: dict[str, Any]) -> Row:
    tenths = statistics.quantiles(steps_ms, n=10, method="inclusive")
    step_ms = statistics.median(steps_ms)
    differences = [entry["differences"][mode] for entry in results["rounds"] if mode in entry["differences"]]
    return Row(
        mode=mode,
        step_ms=step_ms,
        low_ms=tenths[0],
        high_ms=tenths[-1],
        exposed_ms=step_ms - compute_ms,
        accuracy=None if mode == COMPUTE else results["accuracy"][mode],
        difference=max(differences) if differences else None,
    )


def disagreeing(table: list[Row]) -> list[Row]:
    """The modes whose parameters are not DDP's; a NaN is one."""
    return [row for row in table if row.difference is not None and not row.difference <= TOLERANCE]


def as_cells(table: list[Row]) -> tuple[list[str], list[list[str]]]:
    headers = ["", "ms per step", "80 % of steps", "exposed ms", "held-out accuracy", "difference to DDP"]
    return headers, [
        [
            MODES[row.mode],
            f"{row.step_ms:.1f}",
            f"{row.low_ms:.0f} to {row.high_ms:.0f}",
            "-" if row.mode == COMPUTE else f"{row.exposed_ms:.1f}",
            "-" if row.accuracy is None else f"{row.accuracy:.1%}",
            "-" if row.difference is None else f"{row.difference:.1g}",
        ]
        for row in table
    ]
