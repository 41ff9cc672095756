"""``gradcast dev lab adapt``: how gradcast follows a change of the network or of compute during training."""

import argparse
import dataclasses
import sys
from typing import Any

from tabulate import tabulate

from gradcast.cli import common
from gradcast.cli.dev import lab_options
from gradcast.lab.adapt import SCENARIOS, AdaptSettings, Phase, phases
from gradcast.lab.adapt import run as train
from gradcast.lab.program import unwind_when_told_to_end
from gradcast.lab.report import describe_links

_EXAMPLE = (
    "gradcast dev lab adapt --hosts 4 --bandwidth 500mbit --model resnet50 --scale-size 0.1 \\\n"
    "    --forward 100ms --backward 200ms --scenario network --plot adapt.png"
)
_STEPS_MIN = 120  # a third of the steps must hold ordinary steps, a change, and a warm-up


def add_parser(commands: Any) -> None:
    parser = common.command(
        commands, "adapt", "see how gradcast follows a change during training", lab_options.STAND_IN, _EXAMPLE
    )
    lab_options.add_links(parser)
    common.option(parser, "--model", "PROFILE", lab_options.PROFILES, default="resnet50")
    lab_options.add_stand_in(parser)
    scenarios = "; ".join(f"{name}: {words.format(factor=2)}" for name, words in SCENARIOS.items())
    scenarios = f"what changes during the middle third of the steps: {scenarios}"
    common.option(parser, "--scenario", None, scenarios, default="network", choices=list(SCENARIOS))
    common.option(parser, "--factor", "FACTOR", "slowdown", common.factor(0.01, 100), "2")
    steps = common.whole_number(_STEPS_MIN, 100_000)
    common.option(parser, "--steps", "N", f"number of steps, at least {_STEPS_MIN}", steps, "180")
    lab_options.add_timeout_option(parser, "15min")
    lab_options.add_output_options(parser, "steps")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    settings = AdaptSettings(
        model=args.model,
        profile=lab_options.stand_in_profile(args).to_json(),
        rates_bits_per_s=lab_options.bandwidths_of(args),
        scenario=args.scenario,
        factor=args.factor,
        scale_size=args.scale_size or 1.0,
        steps=args.steps,
        ranks_per_host=args.ranks_per_host,
    )
    lab_options.check_machine(args)
    unwind_when_told_to_end()
    title = (
        f"a timed stand-in for {settings.model}, {describe_links(settings.rates_bits_per_s, settings.ranks_per_host)}"
    )
    print(f"{title}; from step {settings.changes_at} to {settings.returns_at}, {settings.description}", file=sys.stderr)
    results = train(settings, timeout_s=args.timeout, output=sys.stderr)
    found = phases(results, settings)
    if args.json:
        fields = dataclasses.asdict(settings)
        bandwidths = [bits / 1e9 for bits in fields.pop("rates_bits_per_s")]
        fields |= {"bandwidths_gbit_per_s": bandwidths, "stand_in": True}
        phases_json = [dataclasses.asdict(phase) for phase in found]
        common.print_json({"settings": fields, **results, "phases": phases_json})
    else:
        print(f"\n{_table(found, settings)}")
    if args.plot:
        from gradcast.plots import draw_adapt

        changed = range(settings.changes_at, settings.returns_at)
        draw_adapt(args.plot, results["steps"], changed, description=settings.description, title=title)
        print(f"The picture is in {args.plot}.", file=sys.stderr)


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
