"""``gradcast lab run``: runs a training script once per host."""

import argparse
import sys
from pathlib import Path
from typing import Any

from gradcast.cli import common
from gradcast.cli.lab_options import WHERE, add_hosts_option, add_latency_option, add_rate_option, add_timeout_option
from gradcast.errors import Error
from gradcast.lab import Network, run_workers
from gradcast.lab.program import unwind_when_told_to_end

_EXAMPLE = "gradcast lab run --hosts 2 --rate 100mbit -- examples/digits.py --gradcast overlap"


def add_parser(actions: Any) -> None:
    parser = common.new_parser(actions, "run", "run a training script once per host, as torchrun does", WHERE, _EXAMPLE)
    add_hosts_option(parser, default=2, help_="number of hosts (default: 2)")
    add_rate_option(parser, "100mbit")
    add_latency_option(parser)
    add_timeout_option(parser, 600)
    parser.add_argument("script", nargs="+", metavar="SCRIPT", help="Python script and its arguments, after --")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    if not Path(args.script[0]).exists():
        raise Error(f"the script {args.script[0]} does not exist")
    unwind_when_told_to_end()
    with Network(args.hosts, args.rate, args.latency / 1e9) as network:
        run_workers(args.script, args.hosts, timeout_s=args.timeout, network=network, errors=sys.stderr)
