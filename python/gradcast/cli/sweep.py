"""``gradcast sweep``: compares policies over many bandwidths and world sizes, as CSV and as a picture."""

import argparse
import csv
import io
import sys
from typing import Any

from gradcast import _core
from gradcast.cli import common
from gradcast.cli.network_options import DEFAULT_LATENCY, WORKERS_MAX, derived_network
from gradcast.comparison.compare import Comparison, compare
from gradcast.errors import Error
from gradcast.files import check_writable, write_text
from gradcast.units import format_bandwidth, format_time, parse_time_ns

_EXAMPLE = (
    "gradcast sweep resnet50 --scale 0.5 --bandwidths 1gbit,3gbit,10gbit,25gbit --workers 2,8,64 "
    "-o sweep.csv --plot sweep.png"
)
COLUMNS = [
    "profile", "scale", "mode", "in_flight", "topology", "latency_ns", "workers", "bandwidth_gbit_per_s", "policy",
    "blocks", "predicted_ms", "bound_ms", "plain_bound_ms", "ratio_to_bound", "ratio_to_plain_bound",
    "speedup_over_ddp", "all_reduce_only",
]  # fmt: skip


def add_parser(commands: Any) -> None:
    parser = common.new_parser(
        commands,
        "sweep",
        "compare policies over many networks",
        "Writes one CSV line per bandwidth, world size and policy, and optionally draws the speed-up over DDP.",
        _EXAMPLE,
    )
    common.add_profile_argument(parser)
    parser.add_argument(
        "--bandwidths",
        type=common.list_of(common.BANDWIDTH),
        required=True,
        metavar="RATES",
        help="bandwidths of one worker's connection, separated by commas: 1gbit,3gbit,10gbit",
    )
    parser.add_argument(
        "--workers",
        type=common.list_of(common.whole_number(1, WORKERS_MAX)),
        required=True,
        metavar="NS",
        help="world sizes, separated by commas: 2,8,64",
    )
    parser.add_argument(
        "--latency",
        type=common.TIME,
        default=parse_time_ns(DEFAULT_LATENCY),
        metavar="TIME",
        help=f"latency of one hop (default: {DEFAULT_LATENCY})",
    )
    parser.add_argument(
        "--topology", choices=["ring", "tree"], default="ring", help="algorithm of the all-reduce (default: ring)"
    )
    common.add_policies_option(parser, "--policies")
    common.add_schedule_options(parser)
    parser.add_argument("-o", "--output", metavar="CSV", help="write the table to this file (default: print it)")
    parser.add_argument("--plot", metavar="PNG", help="draw the speed-up over DDP against the bandwidth")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    profile = common.profile_from(args)
    if args.output:
        check_writable(args.output, "table")
    if args.plot:
        check_writable(args.plot, "picture")
        from gradcast.plots import draw_sweep
    rows = _rows(args, profile)
    text = _as_csv(rows)
    if args.output:
        write_text(args.output, text, "table")
    else:
        print(text, end="")
    if args.plot:
        name = common.profile_name(profile, args.scale)
        draw_sweep(
            args.plot, rows, title=f"{name}, {args.topology}, {format_time(args.latency)} per hop, {args.mode} mode"
        )


def _rows(args: argparse.Namespace, profile: _core.Profile) -> list[dict[str, Any]]:
    points = [(workers, bandwidth) for workers in sorted(args.workers) for bandwidth in sorted(args.bandwidths)]
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    for index, (workers, bandwidth) in enumerate(points):
        # On stderr, so that the table can go into a pipe.
        print(f"[{index + 1}/{len(points)}] {workers} workers, {format_bandwidth(bandwidth)}", file=sys.stderr)
        network = derived_network(args.topology, workers, bandwidth, args.latency)
        comparison = compare(profile, network.link, args.policies, mode=args.mode, in_flight=args.in_flight)
        skipped.update(comparison.skipped)
        rows += _point_rows(args, profile, workers, bandwidth, comparison)
    for name, reason in skipped.items():
        print(f"{name} is left out on some networks: {reason}.", file=sys.stderr)
    if not rows:
        raise Error("none of these policies can run here; try --policies all")
    return rows


def _point_rows(
    args: argparse.Namespace, profile: _core.Profile, workers: int, bandwidth: float, comparison: Comparison
) -> list[dict[str, Any]]:
    point = [
        profile.name,
        args.scale,
        args.mode,
        args.in_flight,
        args.topology,
        round(args.latency),
        workers,
        bandwidth / 1e9,
    ]
    rows = []
    for row in comparison.rows:
        times_ms = (row.plan.predicted_ns / 1e6, row.plan.bound_ns / 1e6, row.plan.plain_bound_ns / 1e6)
        ratios = (row.ratio_to_bound, row.ratio_to_plain_bound, row.speedup_over_ddp)
        numbers = [round(value, 6) for value in (*times_ms, *ratios)]
        cells = [*point, row.policy, len(row.plan.blocks), *numbers, int(not row.other_ops)]
        rows.append(dict(zip(COLUMNS, cells, strict=True)))
    return rows


def _as_csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
