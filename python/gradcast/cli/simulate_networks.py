"""``gradcast simulate`` on several networks: a table with a line per network, CSV with a line per policy, a picture."""

import argparse
import csv
import io
import sys
from collections.abc import Iterable
from typing import Any

from gradcast import _core
from gradcast.cli import common
from gradcast.cli.network_options import Network
from gradcast.comparison.compare import Comparison, PolicyResult, compare
from gradcast.comparison.verdict import verdict
from gradcast.disk import write_file
from gradcast.errors import Error
from gradcast.units import format_time

_DIGITS = 6
_NETWORK = ("network", "algorithm", "latency_ms", "workers", "bandwidth_gbit_per_s")


def run(args: argparse.Namespace, profile: _core.Profile, networks: list[Network], names: Iterable[str]) -> None:
    if args.plot:
        _check_drawable(networks)
    comparisons = []
    for index, network in enumerate(networks):
        # On stderr, so that the result can go into a pipe.
        print(f"[{index + 1}/{len(networks)}] {network.description}", file=sys.stderr)
        comparisons.append(compare(profile, network.link, names, mode=args.mode, in_flight=args.in_flight))
    fields = as_json(args, profile, networks, comparisons)
    if not _rows(fields):
        raise Error("none of these policies can run here; try --policy all")
    if args.plot:
        from gradcast.plots import draw_sweep

        words = f"{networks[0].algorithm}, {format_time(networks[0].latency_ns or 0)} per hop, {args.mode} mode"
        draw_sweep(args.plot, _rows(fields), title=f"{common.profile_name(profile, args.scale)}, {words}")
    if not print_result(args, fields):
        _print(args, profile, networks, comparisons)


def print_result(args: argparse.Namespace, fields: dict[str, Any]) -> bool:
    """Writes the CSV, and prints what programs read. Returns whether that was asked for in place of text."""
    if args.csv == "-":
        print(_as_csv(_rows(fields)), end="")
        return True
    if args.csv:
        write_file(args.csv, _as_csv(_rows(fields)), "table")
    if args.json:
        common.print_json({**fields, "step_time": args.step_time})
    return bool(args.json)


def _check_drawable(networks: list[Network]) -> None:
    if any(network.bandwidth_bits_per_s is None for network in networks):
        raise Error("--plot of several networks draws the speed-up over the bandwidth; omit --network and --link")
    if len({network.algorithm for network in networks}) > 1:
        raise Error("--plot of several networks draws one algorithm; omit the others")


def _print(
    args: argparse.Namespace, profile: _core.Profile, networks: list[Network], comparisons: list[Comparison]
) -> None:
    print(common.describe_profile(profile, args.scale))
    common.print_step_time(args)
    print()
    headers = ["network", "DDP ms", "bound ms", "fastest", "step ms", "speed-up over ddp"]
    found = zip(networks, comparisons, strict=True)
    common.print_table([_cells(*each) for each in found], headers, "lrrlrr")
    skipped = {name: reason for comparison in comparisons for name, reason in comparison.skipped.items()}
    if skipped or args.plot or args.csv:
        print()
    for name, reason in skipped.items():
        print(f"{name} is omitted on some networks: {reason}.")
    print_paths(args)


def print_paths(args: argparse.Namespace) -> None:
    for path, what in ((args.csv, "table"), (args.plot, "picture")):
        if path:
            print(f"The {what} is in {path}.")


def _cells(network: Network, comparison: Comparison) -> list[str]:
    ddp, bound = (f"{ns / 1e6:.1f}" for ns in (comparison.ddp.predicted_ns, comparison.bound.best_ns))
    if not comparison.rows:
        return [network.description, ddp, bound, "-", "-", "-"]
    best = comparison.rows[0]
    step = f"{best.plan.predicted_ns / 1e6:.1f}"
    return [network.description, ddp, bound, best.policy, step, f"{best.speedup_over_ddp:.2f} x"]


def as_json(
    args: argparse.Namespace, profile: _core.Profile, networks: list[Network], comparisons: list[Comparison]
) -> dict[str, Any]:
    return {
        "profile": profile.name,
        "scale": args.scale,
        "mode": args.mode,
        "in_flight": args.in_flight,
        "networks": [_network_json(*each) for each in zip(networks, comparisons, strict=True)],
    }


def _network_json(network: Network, comparison: Comparison) -> dict[str, Any]:
    bits = network.bandwidth_bits_per_s
    return {
        "network": network.description,
        "algorithm": network.algorithm,
        "latency_ms": network.latency_ns if network.latency_ns is None else network.latency_ns / 1e6,
        "workers": network.worker_count,
        "bandwidth_gbit_per_s": bits if bits is None else bits / 1e9,
        "compute_ms": _ms(comparison.compute_ns),
        "bound_ms": _ms(comparison.bound.best_ns),
        "plain_bound_ms": _ms(comparison.bound.plain_ns),
        "all_reduce_bound_ms": _ms(comparison.all_reduce_bound.best_ns),
        "policies": [_policy_json(row) for row in comparison.rows],
        "skipped": comparison.skipped,
        "summary": verdict(comparison),
    }


def _policy_json(row: PolicyResult) -> dict[str, Any]:
    return {
        "policy": row.policy,
        "blocks": len(row.plan.blocks),
        "step_ms": _ms(row.plan.predicted_ns),
        "bound_ms": _ms(row.plan.bound_ns),
        "plain_bound_ms": _ms(row.plan.plain_bound_ns),
        "ratio_to_bound": round(row.ratio_to_bound, _DIGITS),
        "ratio_to_plain_bound": round(row.ratio_to_plain_bound, _DIGITS),
        "speedup_over_ddp": round(row.speedup_over_ddp, _DIGITS),
        "all_reduce_only": not row.other_ops,
    }


def _ms(time_ns: float) -> float:
    return round(time_ns / 1e6, _DIGITS)


def _rows(fields: dict[str, Any]) -> list[dict[str, Any]]:
    settings = {name: value for name, value in fields.items() if name != "networks"}
    return [
        {**settings, **{name: network[name] for name in _NETWORK}, **policy}
        for network in fields["networks"]
        for policy in network["policies"]
    ]


def _as_csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, "all_reduce_only": int(row["all_reduce_only"])} for row in rows)
    return text.getvalue()
