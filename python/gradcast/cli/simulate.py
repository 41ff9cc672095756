"""``gradcast simulate``: compares policies on one profile and one network, the best first."""

import argparse
from typing import Any

from gradcast import _core
from gradcast.cli import common
from gradcast.cli.network_options import Network, add_network_options, network_from
from gradcast.comparison.compare import Comparison, PolicyResult, compare, same_bound
from gradcast.comparison.verdict import verdict
from gradcast.errors import Error
from gradcast.files import check_writable

_EXAMPLE = "gradcast simulate resnet50 --scale 0.5 --bandwidth 3gbit --workers 8 --latency 50us --policy all"


def add_parser(commands: Any) -> None:
    parser = common.new_parser(
        commands,
        "simulate",
        "compare policies on a profile and a network",
        "Predicts an iteration under each policy and compares it with the lower bound that no schedule can beat.",
        _EXAMPLE,
    )
    common.add_profile_argument(parser)
    add_network_options(parser)
    common.add_policies_option(parser, "--policy")
    common.add_schedule_options(parser)
    parser.add_argument("--plot", metavar="PNG", help="also draw the plans, one above the other")
    common.add_json_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    profile = common.profile_from(args)
    network = network_from(args, profile)
    if args.plot:
        check_writable(args.plot, "picture")
    comparison = compare(profile, network.link, args.policy, mode=args.mode, in_flight=args.in_flight)
    if not comparison.rows:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in comparison.skipped.items())
        raise Error(f"none of these policies can run here ({reasons}); try --policy all")
    if args.plot:
        from gradcast.plots import draw_comparison

        draw_comparison(args.plot, profile, network.link, comparison, title=_title(args, profile, network))
    if args.json:
        common.print_json(_as_json(args, profile, network, comparison))
    else:
        _print(args, profile, network, comparison)


def _title(args: argparse.Namespace, profile: _core.Profile, network: Network) -> str:
    title = f"{common.profile_name(profile, args.scale)}, {network.description}"
    if args.mode == "hook":
        title += ", hook mode"
    if args.in_flight > 1:
        title += f", {args.in_flight} blocks in flight"
    return title


def _row_cells(row: PolicyResult) -> list[str]:
    return [
        row.policy + (" *" if row.other_ops else ""),
        str(len(row.plan.blocks)),
        f"{row.plan.predicted_ns / 1e6:.1f}",
        f"{row.ratio_to_bound:.3f}",
        f"{row.ratio_to_plain_bound:.3f}",
        f"{row.speedup_over_ddp:.2f} x",
    ]


def _print(args: argparse.Namespace, profile: _core.Profile, network: Network, comparison: Comparison) -> None:
    print(common.describe_profile(profile, args.scale))
    print(f"{network.description}: {common.describe_traffic(profile, network.link, network.worker_count)}")
    if args.mode == "hook":
        print("hook mode: the next forward pass starts when all gradients have arrived")
    if args.in_flight > 1:
        print(f"up to {args.in_flight} blocks in flight")
    print()
    headers = ["policy", "blocks", "iteration ms", "time / bound", "time / plain bound", "speed-up over ddp"]
    common.print_table([_row_cells(row) for row in comparison.rows], headers, "lrrrrr")
    print()
    for row in comparison.rows:
        if row.other_ops:
            print(_footnote(row, comparison))
    for name, reason in comparison.skipped.items():
        print(f"{name} is left out: {reason}.")
    print(verdict(comparison))
    if args.plot:
        print(f"The picture is in {args.plot}.")


def _footnote(row: PolicyResult, comparison: Comparison) -> str:
    text = f"* {row.policy} sends reduce-scatters and all-gathers here"
    own_ns, all_reduce_ns = row.plan.bound_ns, comparison.all_reduce_bound.best_ns
    if same_bound(own_ns, all_reduce_ns):
        return f"{text}."
    return f"{text}; its own bound is {own_ns / 1e6:.1f} ms, that of all-reduces {all_reduce_ns / 1e6:.1f} ms."


def _as_json(
    args: argparse.Namespace, profile: _core.Profile, network: Network, comparison: Comparison
) -> dict[str, Any]:
    return {
        "version": 1,
        "profile": profile.name,
        "scale": args.scale,
        "network": network.description,
        "mode": args.mode,
        "in_flight": args.in_flight,
        "compute_ns": round(comparison.compute_ns),
        "bound_ns": round(comparison.bound.best_ns),
        "plain_bound_ns": round(comparison.bound.plain_ns),
        "all_reduce_bound_ns": round(comparison.all_reduce_bound.best_ns),
        "policies": [
            {
                "policy": row.policy,
                "blocks": len(row.plan.blocks),
                "predicted_ns": round(row.plan.predicted_ns),
                "bound_ns": round(row.plan.bound_ns),
                "plain_bound_ns": round(row.plan.plain_bound_ns),
                "ratio_to_bound": row.ratio_to_bound,
                "ratio_to_plain_bound": row.ratio_to_plain_bound,
                "speedup_over_ddp": row.speedup_over_ddp,
                "all_reduce_only": not row.other_ops,
            }
            for row in comparison.rows
        ],
        "skipped": comparison.skipped,
        "summary": verdict(comparison),
    }
