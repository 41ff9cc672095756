"""Runs a training script on hosts made for it: ``python -m benchmarks.lab --hosts 2 --rate 100mbit -- script.py``."""

import argparse
import sys

from benchmarks.lab import Network, run_workers
from benchmarks.lab.program import run_program
from gradcast.units import parse_bandwidth_bits_per_s


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lab",
        description="Runs a training script once per host, as torchrun would, on hosts that are network namespaces of "
        "this machine joined by slow links. Needs root, Linux and iproute2; removes everything when it ends.",
        epilog="example: python -m benchmarks.lab --hosts 2 --rate 100mbit -- examples/digits.py --gradcast off",
    )
    parser.add_argument("--hosts", type=int, default=2, help="how many (default: 2)")
    parser.add_argument("--rate", default="100mbit", help="speed of each host's link, each way (default: 100mbit)")
    parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="end the run then (default: 600)")
    parser.add_argument("script", nargs="+", help="a Python script and its arguments, after --")
    return parser


def main() -> int:
    args = _parser().parse_args()
    with Network(args.hosts, parse_bandwidth_bits_per_s(args.rate)) as network:
        run_workers(args.script, args.hosts, timeout_s=args.timeout, network=network)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main, "lab"))
