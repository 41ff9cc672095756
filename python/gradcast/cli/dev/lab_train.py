"""``gradcast dev lab train``: compares ways of sending gradients in real training."""

import argparse
import sys
from typing import Any

from gradcast.cli import common
from gradcast.cli.dev import lab_options
from gradcast.cli.network_options import given
from gradcast.errors import Error
from gradcast.lab.program import unwind_when_told_to_end
from gradcast.lab.report import describe_model, describe_network, report
from gradcast.lab.results import as_json, table_of
from gradcast.lab.settings import REAL_MODELS, Settings
from gradcast.lab.train import train
from gradcast.lab.variants import EXAMPLES, names_of

EXAMPLE = (
    "gradcast dev lab train --hosts 4 --bandwidth 2gbit --model resnet50 --scale-size 0.25 \\\n"
    "    --forward 200ms --backward 400ms --compare ddp,ddp-near,hook,overlap --plot lab.png"
)
_STEPS_MIN = 2
_ROUNDS_MIN = 2


def add_parser(commands: Any) -> None:
    parser = common.command(
        commands, "train", "compare ways of sending gradients in real training", lab_options.STAND_IN, EXAMPLE
    )
    lab_options.add_links(parser)
    lab_options.add_latency_option(parser)
    models = (
        f"{' or '.join(REAL_MODELS)}: trained for real; or a profile ({lab_options.PROFILES}), trained by a stand-in"
    )
    common.option(parser, "--model", "NAME", models, required=True)
    variants = f"variants, separated by commas: {EXAMPLES}; alone and ddp always run"
    common.option(parser, "--compare", "NAMES", variants, common.argument(names_of), "ddp,hook,overlap")
    lab_options.add_stand_in(parser)
    common.option(parser, "--width", "N", "width of digits or char_gpt", common.whole_number(4, 4096))
    batch = "batch size per rank of digits or char_gpt (default: 8)"
    common.option(parser, "--batch", "N", batch, common.whole_number(1, 1000))
    rounds = f"number of rounds, in which each variant has one turn; at least {_ROUNDS_MIN}"
    common.option(parser, "--rounds", "N", rounds, common.whole_number(_ROUNDS_MIN, 10_000), "5")
    steps = "number of steps of a turn; the first one is not counted"
    common.option(parser, "--steps", "N", steps, common.whole_number(_STEPS_MIN, 10_000), "4")
    in_flight = "largest number of gradcast's blocks in flight"
    common.option(parser, "--in-flight", "N", in_flight, common.whole_number(1, 1000), "1")
    lab_options.add_timeout_option(parser, "15min")
    lab_options.add_output_options(parser, "results")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    settings = _settings(args)
    lab_options.check_machine(args)
    unwind_when_told_to_end()
    print(f"{settings.model}, {describe_network(settings)}: {', '.join(settings.names)}", file=sys.stderr, flush=True)
    results = train(settings, timeout_s=args.timeout, output=sys.stderr)
    table = table_of(results, settings)
    if args.json:
        common.print_json(as_json(table, results, settings))
    else:
        print(report(table, settings, results["parameter_bytes"]))
    if args.plot:
        from gradcast.plots import draw_lab

        title = f"{describe_model(settings, results['parameter_bytes'])}, {describe_network(settings)}"
        draw_lab(args.plot, table, title=title)
        print(f"The picture is in {args.plot}.", file=sys.stderr)
    if table.wrong:
        names = ", ".join(row.name for row in table.wrong)
        raise Error(f"the parameters that {names} trained are not those of ddp", "internal")


def _settings(args: argparse.Namespace) -> Settings:
    bandwidths = lab_options.bandwidths_of(args)
    real = args.model in REAL_MODELS
    if foreign := given(args, *(("forward", "backward", "scale_size") if real else ("width", "batch"))):
        kind = "stand-ins" if real else "real models"
        raise Error(f"{foreign[0]} only works with {kind}, and {args.model} is not one")
    profile = None if real else lab_options.stand_in_profile(args)
    return Settings(
        model=args.model if profile is None else profile.name,
        profile=None if profile is None else profile.to_json(),
        rates_bits_per_s=bandwidths,
        names=tuple(args.compare),
        scale_size=args.scale_size or Settings.scale_size,
        width=args.width,
        batch=args.batch or Settings.batch,
        rounds=args.rounds,
        steps=args.steps,
        in_flight=args.in_flight,
        latency_s=args.latency / 1e9,
        ranks_per_host=args.ranks_per_host,
    )
