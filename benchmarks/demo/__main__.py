"""``make demo`` runs ``python -m benchmarks.demo``: trains on two workers, prints a table, draws a picture."""

import argparse
import dataclasses
import importlib
import importlib.util
import json
import sys
from contextlib import nullcontext
from typing import IO, Any

import gradcast
from benchmarks.demo import lanes
from benchmarks.demo.results import MODES, SHOWN, TOLERANCE, Row, disagreeing, report, rows
from benchmarks.pages import run_program
from gradcast.disk import check_writable
from gradcast.lab import LabError, Network
from gradcast.lab.variants import BASELINE
from gradcast.lab.workers import run_for_result
from gradcast.units import format_bandwidth, parse_bandwidth_bits_per_s

_TIMEOUT_S = 600


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo",
        description="Trains a network on handwritten digits on two workers with PyTorch DDP and with gradcast, in "
        "turns, over a slow link; prints what a step took and whether the parameters are equal, and draws one step. "
        "Layers wait as long as an accelerator would compute, so that the cores are free for the network.",
    )
    parser.add_argument(
        "--bandwidth",
        help="of each worker's link, for instance 200mbit (default: one on which a step's gradients travel as long as "
        "the step computes)",
    )
    parser.add_argument("--rounds", type=int, help="at least 1")
    parser.add_argument("--steps", type=int, help="per mode and round, at least 4")
    parser.add_argument("--loopback", action="store_true", help="without a slow link, as where there is no root")
    parser.add_argument(
        "--json", action="store_true", help="print the table as JSON, and the progress to standard error"
    )
    parser.add_argument("-o", "--output", default="demo.png", metavar="PNG", help="the picture (default: demo.png)")
    return parser


def main() -> int:
    args = _parser().parse_args()
    bandwidth = None if args.bandwidth is None else parse_bandwidth_bits_per_s(args.bandwidth)
    _check_packages()
    from benchmarks.demo.training import Settings

    given = {name: value for name in ("rounds", "steps") if (value := getattr(args, name)) is not None}
    settings = dataclasses.replace(Settings(), **given)
    if settings.rounds < 1 or settings.steps < 4:
        raise LabError("at least 1 round of 4 steps is needed")
    check_writable(args.output, "picture")
    output = sys.stderr if args.json else sys.stdout
    network, link = _network(settings.hosts, bandwidth or settings.rate_bits_per_s, args.loopback, output)
    with network or nullcontext():
        _tell(
            f"{settings.hosts} workers train on handwritten digits over {link}: {settings.gradient_bytes / 1e6:.1f} "
            f"MB of gradients, {settings.compute_ms:.0f} ms of compute in which layers wait as an accelerator would "
            "compute. About two minutes.",
            output,
        )
        results = run_for_result(
            "benchmarks.demo.worker:train",
            [settings],
            settings.hosts,
            timeout_s=_TIMEOUT_S,
            network=network,
            output=output,
        )
    table = rows(results)
    if args.json:
        fields = {"version": 1, "settings": dataclasses.asdict(settings), "link": link, "tolerance": TOLERANCE}
        print(json.dumps({**fields, "rows": [dataclasses.asdict(row) for row in table]}, indent=2))
    else:
        print(report(table, settings.rounds * settings.steps, link))
    draw(args.output, table, results, f"Two workers, {link}, {settings.gradient_bytes / 1e6:.1f} MB of gradients")
    _tell(f"The picture is in {args.output}.", output)
    return 1 if disagreeing(table) else 0


def _check_packages() -> None:
    """Before anything runs, not after a minute of training."""
    importlib.import_module("gradcast.plots")  # says itself what it lacks
    for module, package in {"torch": "torch", "sklearn": "scikit-learn"}.items():
        if importlib.util.find_spec(module) is None:
            raise LabError(f"the demo needs {package}, which is not installed: pip install {package}")


def _network(workers: int, rate_bits_per_s: float, loopback: bool, output: IO[str]) -> tuple[Network | None, str]:
    """Hosts with slow links, or loopback where none can be made; what it is, in words."""
    try:
        if not loopback:
            return Network(workers, rate_bits_per_s), f"a link of {format_bandwidth(rate_bits_per_s)}"
        reason = "as asked for"
    except LabError as error:
        reason = str(error)
    _tell(f"No slow link: {reason}. The times show only that nothing breaks.", output)
    return None, "loopback"


def draw(path: str, table: list[Row], results: dict[str, Any], subtitle: str) -> None:
    """Raises gradcast.Error where the picture cannot be written or matplotlib is missing."""
    from benchmarks.demo.picture import draw as draw_lanes

    facts = results["gradcast"][SHOWN]
    profile = gradcast.Profile.from_json(json.dumps(facts["profile"]))
    plan = gradcast.Plan.from_json(json.dumps(facts["plan"]))
    step_ms = {row.mode: row.step_ms for row in table}
    steps = [
        (f"{MODES[BASELINE]}, one step", lanes.of_ddp(results["ddp_trace"], step_ms[BASELINE])),
        (f"{MODES[SHOWN]}, one step", lanes.of_timeline(facts["timeline"], step_ms[SHOWN])),
        (f"{MODES[SHOWN]}, as its plan predicted", lanes.of_plan(profile, plan)),
    ]
    draw_lanes(path, steps, table, subtitle)


def _tell(text: str, output: IO[str]) -> None:
    print(text, file=output, flush=True)


if __name__ == "__main__":
    sys.exit(run_program(main, "demo"))
