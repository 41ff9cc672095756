"""Alarms on hosts with slow links: does each change get the right cause, how fast, and do quiet steps get none?

    python -m benchmarks.alarm_causes [--hosts 4] [--rate 1200mbit] [--steps 120] [--quiet-steps 2000]

A timed stand-in of ResNet-50 (root, iproute2), changed from a third to two thirds of the steps: the link of host 1
halved, host 1 computing 1.3 times as long, host 1 loading data for 20 ms more.
"""

import argparse
import sys
from typing import Any

from tabulate import tabulate

from benchmarks.pages import run_program
from gradcast.cli.common import BANDWIDTH
from gradcast.files import load_profile
from gradcast.lab.adapt import AdaptSettings
from gradcast.lab.adapt import run as train

# Scenario of the laboratory, factor, right cause, right rank, right hosts.
CHANGES = {
    "link": ("link", 2.0, "link", None, [1]),
    "host": ("host", 1.3, "compute", 1, None),
    "data": ("data", 3.0, "data", 1, None),
    "quiet": ("host", 1.0, None, None, None),
}
_TIMEOUT_S = 900.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", type=BANDWIDTH, default=1.2e9)
    parser.add_argument("--scale", type=float, default=1.0, help="of the stand-in's compute")
    parser.add_argument("--scale-size", type=float, default=0.2, help="of its gradients")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--quiet-steps", type=int, default=2000)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(CHANGES))
    args = parser.parse_args()
    rows = []
    for name in args.only:
        scenario, factor, *right = CHANGES[name]
        settings = AdaptSettings(
            model="resnet50",
            profile=load_profile("resnet50", args.scale).to_json(),
            rates_bits_per_s=(args.rate,) * args.hosts,
            scenario=scenario,
            factor=factor,
            scale_size=args.scale_size,
            steps=args.quiet_steps if name == "quiet" else args.steps,
        )
        results = train(settings, timeout_s=_TIMEOUT_S, output=sys.stderr)
        rows.append(_row(name, right, settings, results))
    print(tabulate(rows, ["change", "step ms", "alarm", "steps after it", "over after", "other alarms"]))


def _row(name: str, right: list[Any], settings: AdaptSettings, results: dict[str, Any]) -> list[Any]:
    before_ms = sorted(step["ms"] for step in results["steps"][settings.changes_at // 2 : settings.changes_at])
    alarms = results["alarms"]
    found = [
        alarm
        for alarm in alarms
        if [alarm["cause"], alarm["rank"], alarm["hosts"]] == right and alarm["step"] > settings.changes_at
    ]
    other = [f"{alarm['cause']} at {alarm['step']}" for alarm in alarms if alarm not in found[:1]]
    over = found[0]["until_step"] - settings.returns_at if found and found[0]["until_step"] else "-"
    cells = ["none", "-", "-"] if not found else [found[0]["cause"], found[0]["step"] - settings.changes_at, over]
    return [name, f"{before_ms[len(before_ms) // 2]:.0f}", *cells, ", ".join(other) or "none"]


if __name__ == "__main__":
    sys.exit(run_program(main, "alarm_causes"))
