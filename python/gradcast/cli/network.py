"""``torchrun ... -m gradcast network``: measures the network between the workers, before a training."""

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
_SECONDS_MIN, _SECONDS_MAX = 2, 600


def add_parser(commands: Any) -> None:
    parser = common.command(
        commands,
        "network",
        "measure the network between the workers, and find the setting that limits it",
        "Start it on all hosts as you start a training: with torchrun, or with RANK, WORLD_SIZE, MASTER_ADDR and "
        "MASTER_PORT set.",
        _EXAMPLE,
    )
    duration = "approximate duration, 2s to 10min; somewhat longer on slow links or with more than 8 hosts"
    common.option(parser, "--duration", "TIME", duration, common.DURATION, "10s")
    common.add_json_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise Error(f"{missing[0]} is not set, so there are no workers to measure between; start it with `{_EXAMPLE}`")
    world_size = common.environment_number("WORLD_SIZE", 1, common.WORKERS_MAX)
    rank = common.environment_number("RANK", 0, world_size - 1)
    common.environment_number("MASTER_PORT", 1, 65535)
    if not _SECONDS_MIN <= args.duration <= _SECONDS_MAX:
        raise Error(f"--duration must be from {_SECONDS_MIN}s to {_SECONDS_MAX // 60}min")
    common.require_torch("gradcast network")
    found = _checked(args.duration, quiet=args.json)
    if found is None:
        raise Error(f"there is only one worker; start at least two, for instance with `{_EXAMPLE}`")
    if rank != 0:
        return
    if args.json:
        common.print_json(_in_ms(found))
    else:
        _print(found)


def _in_ms(value: Any) -> Any:
    """Returns the fields of doctor.json with every time in ms, as other commands print them."""
    if isinstance(value, list):
        return [_in_ms(each) for each in value]
    if not isinstance(value, dict):
        return value
    return dict(
        (f"{key.removesuffix('_us')}_ms", each if each is None else each / 1e3)
        if key.endswith("_us")
        else (key, _in_ms(each))
        for key, each in value.items()
    )


def _checked(seconds: float, quiet: bool) -> dict[str, Any] | None:
    import torch
    import torch.distributed as dist

    from gradcast.diagnosis.network.check import check
    from gradcast.training.ranks.group import make_group

    try:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=_TIMEOUT_S))
    except (RuntimeError, ValueError) as error:
        raise Error(f"the workers cannot connect to each other: {first_line(error)}", "communication") from None
    try:
        group = make_group(None, torch.device("cpu"), None)
        progress = None if quiet else lambda line: print(f"gradcast: {line}", file=sys.stderr)
        return check(group, seconds=seconds, progress=progress)
    finally:
        dist.destroy_process_group()


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
