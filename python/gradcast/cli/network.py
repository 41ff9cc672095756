"""``torchrun ... -m gradcast network``: what the network between the workers can do, before anything is trained."""

import argparse
import datetime
import os
import sys
from typing import Any

from gradcast.cli import common
from gradcast.errors import Error, first_line
from gradcast.units import format_bandwidth, format_size, format_time

_EXAMPLE = "torchrun --nproc-per-node 2 -m gradcast network"
_TIMEOUT_S = 120


def add_parser(commands: Any) -> None:
    parser = common.new_parser(
        commands,
        "network",
        "measure the network between the workers, and find the setting that limits it",
        "Start it on all hosts as you start a training: with torchrun, or with RANK, WORLD_SIZE, MASTER_ADDR and "
        "MASTER_PORT set.",
        _EXAMPLE,
    )
    parser.add_argument(
        "--seconds",
        type=common.whole_number(2, 600),
        default=10,
        metavar="N",
        help="duration; somewhat longer on slow links or with more than 8 hosts (default: 10)",
    )
    common.add_json_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise Error(f"{missing[0]} is not set, so there are no workers to measure between; start it with\n  {_EXAMPLE}")
    found = _checked(args.seconds, quiet=args.json)
    if found is None:
        raise Error(f"there is only one worker; start at least two, for instance with\n  {_EXAMPLE}")
    if os.environ["RANK"] != "0":
        return
    if args.json:
        common.print_json(found)
    else:
        _print(found)


def _checked(seconds: int, quiet: bool) -> dict[str, Any] | None:
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        raise Error("gradcast network needs PyTorch, which is not installed: pip install torch") from None
    from gradcast.diagnosis.network.check import check
    from gradcast.training.ranks.group import make_group

    try:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=_TIMEOUT_S))
    except (RuntimeError, ValueError) as error:
        raise Error(f"the workers cannot connect to each other: {first_line(error)}", "communication") from None
    try:
        group = make_group(None, torch.device("cpu"), None)
        return check(group, seconds=seconds, progress=None if quiet else _print_progress)
    finally:
        dist.destroy_process_group()


def _print_progress(line: str) -> None:
    print(f"gradcast: {line}", file=sys.stderr)


def _print(found: dict[str, Any]) -> None:
    rows = [
        [
            f"{pair['a']} - {pair['b']}",
            "-" if pair["latency_us"] is None else format_time(1e3 * pair["latency_us"]),
            *(_rate(pair[key]) for key in ("tcp_gbit_per_s", "tcp_streams_gbit_per_s", "gloo_gbit_per_s")),
            f"{format_time(1e3 * pair['alpha_us'])} + {format_time(1e6 * pair['beta_ns_per_byte'])}/MB",
        ]
        for pair in found["pairs"]
    ]
    streams = found["pairs"][0]["streams"]
    common.print_table(
        rows, ["ranks", "one way", "TCP, 1 stream", f"{streams} streams", "Gloo", "Gloo message"], "lrrrrr"
    )
    print()
    collective = found["collective"]
    rows = [[format_size(sample["bytes"]), format_time(1e6 * sample["ms"])] for sample in collective["samples"]]
    common.print_table(rows, ["all-reduce of", "time"], "rr")
    slope = format_time(1e6 * collective["beta_ns_per_byte"])
    print(f"\nAn all-reduce takes {format_time(1e3 * collective['alpha_us'])} + {slope} per MB.")
    for finding in found["findings"]:
        print(f"\n{finding['key']}: {finding['sentence']}.")


def _rate(gbit_per_s: float | None) -> str:
    return "-" if gbit_per_s is None else format_bandwidth(1e9 * gbit_per_s)
