"""``make demo`` runs ``python -m benchmarks.demo``: trains on two workers, prints a table, draws a picture."""

import argparse
import dataclasses
import importlib.util
import json
import sys
from contextlib import nullcontext
from typing import IO

from benchmarks.demo.report import draw, report
from benchmarks.demo.results import TOLERANCE, disagreeing, rows
from benchmarks.demo.run import choose_rate, train
from benchmarks.demo.settings import Settings
from gradcast.files import check_writable
from gradcast.lab import LabError, Network
from gradcast.lab.program import run_program
from gradcast.units import format_bandwidth, parse_bandwidth_bits_per_s

_UNLIMITED_BITS_PER_S = 10e9  # until the speed is known


def _parser() -> argparse.ArgumentParser:
    defaults = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo",
        description="Trains a CNN on handwritten digits on two workers with PyTorch DDP and with gradcast, in turns, "
        "over a slow link; prints what a step took and whether the parameters are equal, and draws one step.",
    )
    parser.add_argument(
        "--rate",
        help="speed of each worker's link, for instance 200mbit (default: one on which a step's gradients travel as "
        "long as the step computes)",
    )
    parser.add_argument("--rounds", type=int, default=defaults.rounds, help=f"default: {defaults.rounds}; at least 2")
    parser.add_argument(
        "--steps", type=int, default=defaults.steps, help=f"per mode and round (default: {defaults.steps})"
    )
    parser.add_argument("--loopback", action="store_true", help="without a slow link, as where there is no root")
    parser.add_argument(
        "--json", action="store_true", help="print the table as JSON, and the progress to standard error"
    )
    parser.add_argument("-o", "--output", default="demo.png", metavar="PNG", help="the picture (default: demo.png)")
    return parser


def _settings(args: argparse.Namespace) -> Settings:
    if args.rounds < 2 or args.steps < 10:
        raise LabError("at least 2 rounds of 10 steps are needed: the first round measures, the others are timed")
    return dataclasses.replace(Settings(), rounds=args.rounds, steps=args.steps)


def _check_packages() -> None:
    """Before anything runs, not after a minute of training."""
    importlib.import_module("gradcast.plots")  # says itself what it lacks
    for module, package in {"torch": "torch", "sklearn": "scikit-learn"}.items():
        if importlib.util.find_spec(module) is None:
            raise LabError(f"the demo needs {package}, which is not installed: pip install {package}")


def _network(settings: Settings, loopback: bool) -> tuple[Network | None, str]:
    """Hosts with slow links, or, where none can be made, None and why."""
    if loopback:
        return None, "as asked for"
    try:
        return Network(settings.workers, _UNLIMITED_BITS_PER_S), ""
    except LabError as error:
        return None, str(error)


def _link(
    settings: Settings, network: Network | None, reason: str, rate_bits_per_s: float | None, output: IO[str]
) -> str:
    """Makes the link slow; what it is, in words."""
    if network is None:
        _tell(f"No slow link: {reason}. The times show only that nothing breaks.", output)
        return "loopback"
    if rate_bits_per_s is not None:
        network.set_all_rates(rate_bits_per_s)
        return f"a link of {format_bandwidth(rate_bits_per_s)}"
    _tell("Measuring how long a step computes here ...", output)
    words = f"a link of {format_bandwidth(choose_rate(settings, network))}"
    _tell(f"Chosen: {words} (tc tbf), on which a step's gradients travel as long; --rate sets another.", output)
    return words


def main() -> int:
    args = _parser().parse_args()
    settings = _settings(args)
    rate_bits_per_s = None if args.rate is None else parse_bandwidth_bits_per_s(args.rate)
    _check_packages()
    check_writable(args.output, "picture")
    output = sys.stderr if args.json else sys.stdout
    network, reason = _network(settings, args.loopback)
    with network or nullcontext():
        link = _link(settings, network, reason, rate_bits_per_s, output)
        _tell(f"{settings.workers} workers train a CNN on handwritten digits over {link}.", output)
        results = train(settings, network, output)
    table = rows(results)
    if args.json:
        fields = {"settings": dataclasses.asdict(settings), "link": link, "tolerance": TOLERANCE}
        print(json.dumps({**fields, "rows": [dataclasses.asdict(row) for row in table]}, indent=2))
    else:
        print(report(table, settings, link))
    draw(args.output, table, results, settings, link)
    _tell(f"The picture of one step is in {args.output}.", output)
    return 1 if disagreeing(table) else 0


def _tell(text: str, output: IO[str]) -> None:
    print(text, file=output, flush=True)


if __name__ == "__main__":
    sys.exit(run_program(main, "demo"))
