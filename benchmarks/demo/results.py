"""From what rank 0 measured to the table, one row per mode, and to what it says."""

import statistics
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from gradcast.lab.variants import BASELINE, COMPUTE

# Ways of training: same model, data and optimizer, gradients sent in different ways. COMPUTE sends nothing.
MODES = {
    BASELINE: "DDP",
    "ddp:0.5": "DDP, buckets of 0.5 MiB",
    "hook": "gradcast, hook mode",
    "overlap": "gradcast, overlap mode",
    COMPUTE: "no communication",
}
SHOWN = "overlap"
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
    # The first round is the warm-up: gradcast measures, and DDP lays out its buckets.
    steps = {mode: [ms for entry in rounds[1:] for ms in entry["steps_ms"][mode]] for mode in rounds[0]["steps_ms"]}
    medians = {mode: statistics.median(steps[mode]) for mode in steps}

    def row(mode: str) -> Row:
        tenths = statistics.quantiles(steps[mode], n=10, method="inclusive")
        differences = [entry["differences"][mode] for entry in rounds if mode in entry["differences"]]
        return Row(
            mode=mode,
            step_ms=medians[mode],
            low_ms=tenths[0],
            high_ms=tenths[-1],
            exposed_ms=medians[mode] - medians[COMPUTE],
            accuracy=None if mode == COMPUTE else results["accuracy"][mode],
            difference=max(differences) if differences else None,
        )

    return [row(mode) for mode in steps]


def disagreeing(table: list[Row]) -> list[Row]:
    """The modes whose parameters are not DDP's; a NaN is one."""
    return [row for row in table if row.difference is not None and not row.difference <= TOLERANCE]


def report(table: list[Row], timed_steps: int, link: str) -> str:
    """The table, how it was measured, and what it says in one sentence."""
    headers = ["", "ms per step", "80 % of steps", "exposed ms", "held-out accuracy", "difference to DDP"]
    cells = [
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
    text = tabulate(cells, headers, tablefmt="simple", stralign="right", colalign=("left",), disable_numparse=True)
    notes = (
        f"ms per step: the median of {timed_steps} steps on rank 0, the modes in turns, after a warm-up.\n"
        "exposed: what communication adds to the step without communication.\n"
        "difference to DDP: the largest relative one of a parameter, after any round, on any rank, from the same seed."
    )
    return f"\n{text}\n\n{notes}\n\n{_verdict(table, link)}"


def _verdict(table: list[Row], link: str) -> str:
    by_mode = {row.mode: row for row in table}
    ddp = min((row for row in table if row.mode.startswith(BASELINE)), key=lambda row: row.step_ms)
    shown = by_mode[SHOWN]
    speed = f"{ddp.step_ms / shown.step_ms:.2f} times as fast as with the better DDP"
    if shown.high_ms < ddp.low_ms:
        speed = f"Over {link} training with gradcast's overlap is {speed}, and nine of ten steps lie apart."
    else:
        speed = f"This machine is too noisy to tell: overlap's steps were {speed}, but their ranges overlap."
    wrong = disagreeing(table)
    if wrong:
        equal = f"The parameters of {', '.join(MODES[row.mode] for row in wrong)} are NOT those of DDP"
    elif all(row.difference == 0 for row in table if row.difference is not None):
        equal = "The parameters are those of DDP, bit for bit"
    else:
        equal = "The parameters are those of DDP up to rounding"
    return f"{speed} {equal}."
