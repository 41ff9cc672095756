"""What the demo says on the terminal, and which steps its picture shows."""

import json
from typing import Any

from tabulate import tabulate

import gradcast
from benchmarks.demo import lanes
from benchmarks.demo.modes import MODES
from benchmarks.demo.results import Row, as_cells, disagreeing
from benchmarks.demo.settings import Settings
from gradcast.lab.variants import BASELINE, COMPUTE

_SHOWN = "overlap"


def report(table: list[Row], settings: Settings, link: str) -> str:
    """The table, how it was measured, and what it says in one sentence."""
    timed = (settings.rounds - 1) * settings.steps
    headers, cells = as_cells(table)
    text = tabulate(cells, headers, tablefmt="simple", stralign="right", colalign=("left",), disable_numparse=True)
    notes = (
        f"ms per step: the median of {timed} steps on rank 0, the modes in turns; the first round, in which gradcast\n"
        "measures, is left out. exposed: what communication adds, the median less the one of no communication.\n"
        "difference to DDP: the largest of any parameter, after any round, on any rank, from the same seed and batches."
    )
    return f"\n{text}\n\n{notes}\n\n{_verdict(table, link)}"


def _verdict(table: list[Row], link: str) -> str:
    by_mode = {row.mode: row for row in table}
    saved = 1 - by_mode[_SHOWN].step_ms / by_mode[BASELINE].step_ms
    change = f"{abs(saved):.0%} {'shorter' if saved >= 0 else 'longer'}"
    wrong = disagreeing(table)
    if wrong:
        equal = f"The parameters of {', '.join(MODES[row.mode] for row in wrong)} are NOT those of DDP"
    elif all(row.difference == 0 for row in table if row.difference is not None):
        equal = "The parameters are those of DDP, bit for bit"
    else:
        equal = "The parameters are those of DDP up to rounding"
    return f"Over {link} a step with gradcast's overlap is {change} than with DDP. {equal}."


def draw(path: str, table: list[Row], results: dict[str, Any], settings: Settings, link: str) -> None:
    """Raises gradcast.Error where the picture cannot be written or matplotlib is missing."""
    from benchmarks.demo.picture import draw as draw_lanes

    facts = results["gradcast"][_SHOWN]
    profile = gradcast.Profile.from_json(json.dumps(facts["profile"]))
    plan = gradcast.Plan.from_json(json.dumps(facts["plan"]))
    step_ms = {row.mode: row.step_ms for row in table}
    rows = [
        (f"{MODES[BASELINE]}, measured", lanes.of_ddp(results["ddp_trace"], step_ms[BASELINE])),
        (f"{MODES[_SHOWN]}, measured", lanes.of_timeline(facts["timeline"], step_ms[_SHOWN])),
        (f"{MODES[_SHOWN]}, as its plan predicted", lanes.of_plan(profile, plan)),
    ]
    subtitle = (
        f"One step of a CNN on handwritten digits, {settings.workers} workers, {link}, "
        f"{results['parameter_bytes'] / 1e6:.1f} MB of gradients; compute alone takes {step_ms[COMPUTE]:.0f} ms"
    )
    draw_lanes(path, rows, title="One training step with PyTorch DDP and with gradcast", subtitle=subtitle)
