"""Are the doctor's predictions right? Each action that it proposes is taken, and measured.

Trains tests/doctor/train.py in the laboratory, lets ``gradcast doctor`` diagnose it, and then runs it with each action:
overlap mode, 16 bits on the wire, another bucket size, two batches a step, data that is there, no slow rank.

    python -m benchmarks.doctor_actions [--refresh benchmarks/results/tables.md]
"""

import json
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.doctor_causes import run_script
from benchmarks.pages import append, parser_of, read_record, show
from gradcast.lab.hosts import Network

MARK = "doctor actions"
HOSTS = 2
USUAL = ("--layer-ms", "5", "--batch", "4")
STEPS, LEFT_OUT = 60, 30  # gradcast measures and plans in the first ones
# Situations by name: the rate of all links, and what else is wrong.
SITUATIONS = {
    "slow network": (150e6, ()),
    "very slow network": (75e6, ()),
    "slow loader": (2e9, ("--read-ms", "60")),
    "slow rank": (2e9, ("--slow-rank", "1", "--slow-ms", "60")),
}
# What taking an action changes in the script's arguments, and how many batches a step then has.
TAKEN: dict[str, tuple[tuple[str, ...], int]] = {
    "overlap": (("--mode", "overlap"), 1),
    "hook": (("--mode", "hook"), 1),
    "wire": (("--mode", "wire"), 1),
    "accumulate": (("--accumulate", "2"), 2),
    "loader": (("--read-ms", "0"), 1),
    "straggler": (("--slow-ms", "0"), 1),
}


def diagnose(rate_bits_per_s: float, wrong: tuple[str, ...]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, Network(HOSTS, rate_bits_per_s) as network:
        before = ["-m", "gradcast", "doctor", "--no-network", "--duration", "40s", "-o", folder]
        run_script(network, HOSTS, before, [*USUAL, *wrong, "--steps", "40"])
        return json.loads((Path(folder) / "doctor.json").read_text())


def measure(rate_bits_per_s: float, arguments: tuple[str, ...], batches: int) -> float:
    """ms per batch."""
    with tempfile.TemporaryDirectory() as folder, Network(HOSTS, rate_bits_per_s) as network:
        took = Path(folder) / "took"
        run_script(network, HOSTS, [], [*arguments, "--steps", str(STEPS * batches), "--took", str(took)])
        return statistics.median(json.loads(took.read_text())["steps"][LEFT_OUT:]) / batches


def taken(action: dict[str, Any]) -> tuple[tuple[str, ...], int] | None:
    """None for what no argument of the script changes: launch overhead, connections per peer."""
    if action["key"] != "bucket":
        return TAKEN.get(action["key"])
    return ("--bucket-mib", re.search(r"bucket_cap_mb=(\d+)", action["how"])[1]), 1


def rows_of(name: str) -> list[list[str]]:
    rate_bits_per_s, wrong = SITUATIONS[name]
    result = diagnose(rate_bits_per_s, wrong)
    usual_ms = measure(rate_bits_per_s, (*USUAL, *wrong), 1)
    rows = []
    for action in result["actions"]:
        if taken(action) is None:
            continue
        arguments, batches = taken(action)
        took_ms = measure(rate_bits_per_s, (*USUAL, *wrong, *arguments), batches)
        rows.append(
            [
                name,
                result["verdict"]["kind"],
                action["title"],
                f"{action['speedup']:.2f}x ({action['low']:.2f} to {action['high']:.2f})",
                f"{usual_ms / took_ms:.2f}x",
                f"{action['speedup'] / (usual_ms / took_ms) - 1:+.0%}",
                f"{usual_ms:.0f}",
                f"{took_ms:.0f}",
            ]
        )
        print("  ".join(rows[-1]), file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = parser_of(__doc__, "doctor_actions.jsonl")
    parser.add_argument("--only", choices=list(SITUATIONS), help="this situation alone")
    args = parser.parse_args()
    rows = read_record(args.record)
    for name in [args.only] if args.only else SITUATIONS:
        if name not in {row[0] for row in rows}:
            new = rows_of(name)
            rows += new
            for row in new:
                append(args.record, row)
    headers = ["situation", "verdict", "action", "predicted", "measured", "off", "ms before", "ms after"]
    show(tabulate(rows, headers, tablefmt="github", disable_numparse=True), MARK, args.refresh)


if __name__ == "__main__":
    main()
