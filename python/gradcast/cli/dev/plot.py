"""``gradcast dev plot``: draws a plan."""

import argparse
import os
from pathlib import Path
from typing import Any

from gradcast import _core
from gradcast.cli import common
from gradcast.cli.network_options import Network, add_network_options, has_network, network_from
from gradcast.comparison.compare import has_other_ops
from gradcast.errors import Error
from gradcast.files import bundled_profiles, load_plan, load_profile, plan_hash, recorded_link


def add_parser(commands: Any) -> None:
    parser = common.command(
        commands,
        "plot",
        "draw a plan",
        "Shows a compute lane and a link lane, with blocks coloured by first use in forward, and where forward "
        "waits. A plan from `gradcast dev plan -o` records its profile and network; the options below override them.",
        "gradcast dev plot plan.json -o plan.png",
    )
    parser.add_argument("plan", metavar="PLAN", help="a plan, from `gradcast dev plan -o`")
    profile = "profile of the plan (default: the one recorded in the plan)"
    common.option(parser, "--profile", "PROFILE", profile, common.not_empty)
    scale = "multiply every time of the profile (default: recorded in the plan)"
    common.option(parser, "--scale", "FACTOR", scale, common.POSITIVE)
    add_network_options(parser)
    picture = "file of the picture; .svg and .pdf work as well"
    common.option(parser, "-o, --output", "PNG", picture, common.not_empty, required=True)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    plan, origin = load_plan(args.plan)
    profile, scale = _profile(args, origin)
    network = _network(args, origin, profile)
    common.check_picture(args.output)
    _check_layout(args, plan, origin, profile)
    try:
        timeline = _core.play(profile, network.link, plan)
    except Error as error:
        raise Error(f"{args.plan} does not fit {network.description}: {error}", error.code) from None
    from gradcast.plots import draw_plan

    # The plan's own bound is for the profile, scale and network it was made with.
    bound = _core.bound(profile, network.link, mode=plan.mode, in_flight=plan.in_flight, any_op=has_other_ops(plan))
    title = f"{common.profile_name(profile, scale)}, {network.description}"
    draw_plan(args.output, profile, plan, timeline, bound_ns=bound.best_ns, title=title)
    print(f"The picture is in {args.output}.")


def _check_layout(args: argparse.Namespace, plan: _core.Plan, origin: dict[str, Any], profile: _core.Profile) -> None:
    """Rejects a profile with other tensors than those of the plan, even if all bytes happen to fit."""
    try:
        plan.check(profile)
        if origin.get("hash") in (None, plan_hash(plan, profile)):
            return
        reason = "one of them has changed since the plan was made; make the plan again"
    except Error as error:
        reason = str(error)
    if args.profile is not None:
        recorded = f" ({origin['profile']})" if origin.get("profile") else ""
        reason = f"the plan was made for another profile{recorded}; give that one"
    raise Error(f"{args.plan} does not fit the profile {profile.name}: {reason}", "invalid_plan")


def _profile(args: argparse.Namespace, origin: dict[str, Any]) -> tuple[_core.Profile, float]:
    scale = 1.0 if args.scale is None else args.scale
    if args.profile is not None:
        return load_profile(args.profile, scale), scale
    if not origin.get("profile"):
        raise Error(f"{args.plan} does not record its profile; name it with --profile")
    if args.scale is None:
        scale = origin.get("scale") or 1.0
    return _recorded_profile(args.plan, origin["profile"], scale), scale


def _recorded_profile(plan_path: str, recorded: str, scale: float) -> _core.Profile:
    """Loads the profile that a plan records; a relative path may also be relative to the plan."""
    beside_plan = Path(plan_path).parent / recorded
    if recorded not in bundled_profiles() and not os.path.exists(recorded) and os.path.exists(beside_plan):
        return load_profile(str(beside_plan), scale)
    try:
        return load_profile(recorded, scale)
    except Error as error:
        raise Error(
            f"{plan_path} records the profile {recorded}, but {error}; name another with --profile",
            error.code,
        ) from None


def _network(args: argparse.Namespace, origin: dict[str, Any], profile: _core.Profile) -> Network:
    if has_network(args) or origin.get("link") is None:
        return network_from(args, profile)
    description = origin.get("network") or "the network recorded in the plan"
    return Network(recorded_link(origin, args.plan), description)
