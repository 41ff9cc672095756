"""``gradcast dev plan``: makes the plan of one policy, as a table or as JSON."""

import argparse
import bisect
import itertools
import json
from collections.abc import Sequence
from typing import Any

from gradcast import _core
from gradcast.cli import common
from gradcast.cli.network_options import Network, add_network_options, network_from
from gradcast.comparison.compare import has_other_ops, ratio
from gradcast.disk import check_writable, write_file
from gradcast.errors import Error
from gradcast.files import load_profile, plan_hash
from gradcast.units import format_ms, format_percent, format_size, parse_parameter

_ROWS_SHOWN = 40
_OTHER_OPS = (
    "This is dear's plan: on this link model, separate halves of all-reduces end earlier. With real libraries a "
    "reduce-scatter may cost more than an all-reduce, so measure it (docs/reference/networks.md)."
)


def add_parser(commands: Any) -> None:
    parser = common.command(
        commands,
        "plan",
        "plan one step",
        "Shows which bytes are sent together, in which order, and why.",
        "gradcast dev plan resnet50 --scale 0.5 --bandwidth 3gbit --workers 8 -o plan.json",
    )
    common.add_profile_argument(parser)
    common.option(
        parser, "--policy", "NAME", "policy; `gradcast dev policies` lists them", default=_core.DEFAULT_POLICY
    )
    parameter = "set a parameter of the policy, for instance cap_bytes=25MiB; may be repeated"
    common.option(parser, "--set", "NAME=VALUE", parameter, common.argument(parse_parameter), action="append")
    common.add_schedule_options(parser)
    uncertain = "assume that the link's costs are off by up to this share, and take the plan with the best worst case "
    common.option(parser, "--uncertainty", "SHARE", f"{uncertain}(forecast only)", common.FRACTION, "0%")
    add_network_options(parser)
    common.option(parser, "-o, --output", "JSON", "write the plan to this file", common.not_empty)
    common.add_json_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    profile = load_profile(args.profile, args.scale)
    network = network_from(args, profile)
    if args.output:
        check_writable(args.output, "plan")
    parameters = dict(args.set or [])
    if args.uncertainty > 0:
        if args.policy != _core.DEFAULT_POLICY:
            raise Error(f"--uncertainty only works with {_core.DEFAULT_POLICY}; omit it for {args.policy}")
        parameters["uncertainty"] = args.uncertainty
    options = {"policy": args.policy, "mode": args.mode, "in_flight": args.in_flight}
    plan = _core.make_plan(profile, network.link, **options, parameters=parameters)
    text = with_origin(plan, args, profile, network)
    if args.output:
        write_file(args.output, text, "plan")
    if args.json:
        print(text, end="")
    else:
        _print(args, profile, network, plan)


def with_origin(plan: _core.Plan, args: argparse.Namespace, profile: _core.Profile, network: Network) -> str:
    """Returns the plan as JSON with a record of what it was made from, so that a picture needs only the plan."""
    origin = {
        "profile": args.profile,
        "scale": args.scale,
        "network": network.description,
        "link": json.loads(network.link.to_json()),
        "hash": plan_hash(plan, profile),
        "tensors": [tensor.name for tensor in profile.tensors],
    }
    return plan.replace(extra={**plan.extra, "made_with": origin}).to_json()


def _print(args: argparse.Namespace, profile: _core.Profile, network: Network, plan: _core.Plan) -> None:
    print(common.describe_profile(profile, args.scale))
    print(f"{network.description}: {common.describe_traffic(profile, network.link, network.worker_count)}")
    print()
    rows = []
    tensors = profile.tensors
    for index, block in enumerate(plan.blocks[:_ROWS_SHOWN]):
        size = format_size(block.size_bytes)
        times = [f"{block.start_ns / 1e6:.1f}", f"{block.finish_ns / 1e6:.1f}"]
        rows.append([index, block.op, size, *times, _tensors_of(block, tensors), block.reason])
    common.print_table(rows, ["#", "operation", "size", "start ms", "finish ms", "tensors", "why"], "rlrrrll")
    if len(plan.blocks) > _ROWS_SHOWN:
        print(f"… and {len(plan.blocks) - _ROWS_SHOWN} more blocks; -o writes them all to a file")
    print()
    kinds = "" if has_other_ops(plan) else "of all-reduces "
    print(
        f"{plan.policy} ({plan.mode} mode): {len(plan.blocks)} block{'s' if len(plan.blocks) != 1 else ''}, "
        f"{format_ms(plan.predicted_ns)} per step, {ratio(plan.predicted_ns, plan.bound_ns):.3f} x the bound of "
        f"{format_ms(plan.bound_ns)} that no schedule {kinds}can beat."
    )
    if plan.policy == _core.DEFAULT_POLICY and has_other_ops(plan):
        print(_OTHER_OPS)
    if args.uncertainty > 0:
        print(_worst_case(args, profile, network, plan))
    if args.output:
        print(f"The plan is in {args.output}; `gradcast dev plot {args.output} -o plan.png` draws it.")


def _worst_case(args: argparse.Namespace, profile: _core.Profile, network: Network, plan: _core.Plan) -> str:
    """Describes the gain of --uncertainty: the worst of its nine links, with and without it."""

    def certain(link: _core.LinkModel) -> _core.Plan:
        parameters = dict(args.set or [])
        return _core.make_plan(profile, link, mode=args.mode, in_flight=args.in_flight, parameters=parameters)

    factors = (1 - args.uncertainty, 1.0, 1 + args.uncertainty)
    links = [network.link.scaled(*each) for each in itertools.product(factors, factors)]
    worst, worst_usual = (
        max(ratio(_core.play(profile, link, each).iteration_ns, certain(link).predicted_ns) for link in links)
        for each in (plan, certain(network.link))
    )
    return (
        f"If link costs are off by up to {format_percent(args.uncertainty)}, this plan takes at worst {worst:.3f} x "
        f"the time of the plan for the true costs; without --uncertainty it would be {worst_usual:.3f} x."
    )


def _tensors_of(block: _core.Block, tensors: Sequence[_core.Tensor]) -> str:
    """Names the tensors that a block touches. Buffers are laid out in the order of the profile's ``tensors``."""
    indices = [index for index, tensor in enumerate(tensors) if tensor.buffer == block.buffer]
    if not indices:
        raise Error(f"the plan has a block of buffer {block.buffer}, which the profile does not have", "invalid_plan")
    ends = list(itertools.accumulate(tensors[index].bytes for index in indices))
    parts = []
    for low, high in block.ranges:
        first, last = indices[bisect.bisect_right(ends, low)], indices[bisect.bisect_left(ends, high)]
        parts.append(str(first) if first == last else f"{first}-{last}")
    return ", ".join(parts) if len(parts) <= 3 else f"{', '.join(parts[:3])}, … ({len(parts)} ranges)"
