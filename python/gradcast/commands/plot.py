"""``gradcast plot``: one plan as a picture."""

import argparse
import json
from typing import Any

from gradcast import _core
from gradcast.commands import common
from gradcast.commands.network_options import Network, add_network_options, has_network, network_from
from gradcast.errors import Error
from gradcast.files import check_writable, load_plan, load_profile
from gradcast.units import parse_positive

_EXAMPLE = "gradcast plot plan.json -o plan.png"


def add_parser(commands: Any) -> None:
    parser = common.new_parser(
        commands,
        "plot",
        "draw a plan",
        "Shows the lane of compute and the lane of the link, blocks coloured by when\n"
        "forward needs them, and where forward waits. A plan from `gradcast plan -o` notes its profile and network;\n"
        "the options below override that.",
        _EXAMPLE,
    )
    parser.add_argument("plan", metavar="PLAN", help="a plan, from `gradcast plan -o`")
    parser.add_argument(
        "--profile", metavar="PROFILE", help="the profile that the plan is for (default: noted in the plan)"
    )
    parser.add_argument(
        "--scale",
        type=common.argument(parse_positive),
        metavar="FACTOR",
        help="multiply every time of the profile (default: noted in the plan)",
    )
    add_network_options(parser)
    parser.add_argument("-o", "--output", metavar="PNG", required=True, help="the picture; .svg and .pdf work as well")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    plan, fields = load_plan(args.plan)
    origin = fields.get("made_with")
    origin = origin if isinstance(origin, dict) else {}
    profile, scale = _profile(args, origin)
    network = _network(args, origin, profile)
    check_writable(args.output, "picture")
    try:
        plan.check(profile)
        timeline = _core.play(profile, network.link, plan)
    except Error as error:
        raise Error(f"{args.plan} does not fit the profile {profile.name}: {error}", error.code) from None
    from gradcast.pictures import draw_plan

    draw_plan(
        args.output, profile, plan, timeline, title=f"{common.profile_name(profile, scale)}, {network.description}"
    )
    print(f"The picture is in {args.output}.")


def _profile(args: argparse.Namespace, origin: dict[str, Any]) -> tuple[_core.Profile, float]:
    """The profile and the factor that its times were multiplied with."""
    scale = 1.0 if args.scale is None else args.scale
    if args.profile is not None:
        return load_profile(args.profile, scale), scale
    if not isinstance(origin.get("profile"), str):
        raise Error(f"{args.plan} does not note its profile; name it with --profile")
    if args.scale is None:
        scale = origin.get("scale", 1.0)
        if not isinstance(scale, int | float) or not 0 < scale < 1e9:
            raise Error(f"{args.plan}: made_with.scale is no number above 0; name the profile with --profile")
    return load_profile(origin["profile"], scale), scale


def _network(args: argparse.Namespace, origin: dict[str, Any], profile: _core.Profile) -> Network:
    if has_network(args) or "link" not in origin:
        return network_from(args, profile)
    link = _core.LinkModel.from_json(json.dumps(origin["link"]))
    description = origin.get("network")
    return Network(link, description if isinstance(description, str) else "the network noted in the plan")
