"""``gradcast dev lab run``: runs a training script on every host."""

import argparse
import sys
from pathlib import Path
from typing import Any

from gradcast.cli import common
from gradcast.cli.dev import lab_options
from gradcast.errors import Error
from gradcast.lab import Network, run_workers
from gradcast.lab.program import unwind_when_told_to_end

_EXAMPLE = "gradcast dev lab run --hosts 2 --bandwidth 100mbit -- examples/digits.py --gradcast overlap"


def add_parser(commands: Any) -> None:
    parser = common.command(
        commands, "run", "run a training script on every host, as torchrun does", lab_options.WHERE, _EXAMPLE
    )
    lab_options.add_hosts_option(parser, "number of hosts", "2")
    bandwidth = "bandwidth of each host's link, each way"
    common.option(parser, "--bandwidth", "BANDWIDTH", bandwidth, common.BANDWIDTH, "100mbit")
    lab_options.add_latency_option(parser)
    lab_options.add_timeout_option(parser, "10min")
    parser.add_argument("script", nargs="+", metavar="SCRIPT", help="Python script and its arguments, after --")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    if not Path(args.script[0]).exists():
        raise Error(f"the script {args.script[0]} does not exist")
    unwind_when_told_to_end()
    with Network(args.hosts, args.bandwidth, args.latency / 1e9) as network:
        run_workers(
            args.script,
            args.hosts * args.ranks_per_host,
            timeout_s=args.timeout,
            network=network,
            ranks_per_host=args.ranks_per_host,
            errors=sys.stderr,
        )
