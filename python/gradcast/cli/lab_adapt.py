"""``gradcast lab adapt``: how gradcast follows a change of the network or of compute during training."""

import argparse
import dataclasses
import sys
from typing import Any

from tabulate import tabulate

from gradcast.cli import common
from gradcast.cli.lab_options import (
    STAND_IN,
    add_links,
    add_stand_in,
    add_timeout_option,
    check_machine,
    rates_of,
    stand_in_profile,
)
from gradcast.files import bundled_profiles
from gradcast.lab.adapt import SCENARIOS, AdaptSettings, Phase, phases
from gradcast.lab.adapt import run as train
from gradcast.lab.program import unwind_when_told_to_end
from gradcast.lab.report import describe_links

_EXAMPLE = (
    "gradcast lab adapt --hosts 4 --rate 500mbit --model resnet50 --scale-size 0.1 \\\n"
    "    --forward-ms 100 --backward-ms 200 --scenario network -o adapt.png"
)
_STEPS_MIN = 120  # a third of the steps must hold ordinary steps, a change, and a warm-up


def add_parser(actions: Any) -> None:
    parser = common.new_parser(
        actions, "adapt", "see how gradcast follows a change during training", STAND_IN, _EXAMPLE
    )
    add_links(parser)
    parser.add_argument(
        "--model",
        default="resnet50",
        metavar="PROFILE",
        help=f"a JSON file, or one of {', '.join(bundled_profiles())} (default: resnet50)",
    )
    add_stand_in(parser)
    parser.add_argument(
        "--scenario",
        choices=list(SCENARIOS),
        default="network",
        help="what changes during the middle third of the steps: "
        + "; ".join(f"{name}: {words.format(factor=2)}" for name, words in SCENARIOS.items())
        + " (default: network)",
    )
    parser.add_argument(
        "--factor",
        type=common.POSITIVE,
        default=2.0,
        metavar="FACTOR",
        help="slowdown (default: 2)",
    )
    parser.add_argument(
        "--steps",
        type=common.whole_number(_STEPS_MIN, 100_000),
        default=180,
        metavar="N",
        help=f"number of steps, at least {_STEPS_MIN} (default: 180)",
    )
    add_timeout_option(parser, 900)
    parser.add_argument("-o", "--output", metavar="PNG", help="draw the steps")
    common.add_json_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    settings = AdaptSettings(
        model=args.model,
        profile=stand_in_profile(args).to_json(),
        rates_bits_per_s=rates_of(args),
        scenario=args.scenario,
        factor=args.factor,
        scale_size=args.scale_size or 1.0,
        steps=args.steps,
    )
    check_machine(args)
    unwind_when_told_to_end()
    progress = sys.stderr if args.json else sys.stdout
    title = f"a timed stand-in for {settings.model}, {describe_links(settings.rates_bits_per_s)}"
    print(f"{title}; from step {settings.changes_at} to {settings.returns_at}, {settings.description}", file=progress)
    results = train(settings, timeout_s=args.timeout, output=progress)
    found = phases(results, settings)
    if args.json:
        fields = {**dataclasses.asdict(settings), "stand_in": True}
        common.print_json({"settings": fields, **results, "phases": [dataclasses.asdict(phase) for phase in found]})
    else:
        print(f"\n{_table(found, settings)}")
    if args.output:
        from gradcast.plots import draw_adapt

        changed = range(settings.changes_at, settings.returns_at)
        draw_adapt(args.output, results["steps"], changed, description=settings.description, title=title)
        print(f"The picture is in {args.output}.", file=progress)


def _table(found: list[Phase], settings: AdaptSettings) -> str:
    headers = [
        "", "ms per step\nbefore", "with the\nold plan", "with the\nnew plan", "steps until\nthe new plan",
        "longest step\nuntil then, ms",
    ]  # fmt: skip
    names = [settings.description, "as before"]
    rows = [
        [name, _ms(p.before_ms), _ms(p.since_ms), _ms(p.after_ms), p.steps_to_plan or "none", _ms(p.longest_ms)]
        for name, p in zip(names, found, strict=True)
    ]
    return tabulate(rows, headers, tablefmt="simple", stralign="right", colalign=("left",), disable_numparse=True)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
