"""``gradcast lab train``: compares ways of sending gradients in real training."""

import argparse
import sys
from typing import Any

from gradcast.cli import common
from gradcast.cli.lab_options import (
    STAND_IN,
    add_latency_option,
    add_links,
    add_stand_in,
    add_timeout_option,
    check_machine,
    rates_of,
    stand_in_profile,
)
from gradcast.errors import Error
from gradcast.files import bundled_profiles
from gradcast.lab.program import unwind_when_told_to_end
from gradcast.lab.report import describe_model, describe_network, report
from gradcast.lab.results import as_json, table_of
from gradcast.lab.settings import REAL_MODELS, Settings
from gradcast.lab.train import train
from gradcast.lab.variants import EXAMPLES, names_of

EXAMPLE = (
    "gradcast lab train --hosts 4 --rate 2gbit --model resnet50 --scale-size 0.25 \\\n"
    "    --forward-ms 200 --backward-ms 400 --compare ddp,ddp-near,hook,overlap -o lab.png"
)
_STEPS_MIN = 2
_ROUNDS_MIN = 2


def add_parser(actions: Any) -> None:
    parser = common.new_parser(
        actions, "train", "compare ways of sending gradients in real training", STAND_IN, EXAMPLE
    )
    add_links(parser)
    add_latency_option(parser)
    parser.add_argument(
        "--model",
        required=True,
        metavar="NAME",
        help=f"{' or '.join(REAL_MODELS)}: trained for real; or a profile (a JSON file, or one of "
        f"{', '.join(bundled_profiles())}), trained by a stand-in",
    )
    parser.add_argument(
        "--compare",
        type=common.argument(names_of),
        default=names_of("ddp,hook,overlap"),
        metavar="NAMES",
        help=f"variants, separated by commas: {EXAMPLES}; alone and ddp always run (default: ddp,hook,overlap)",
    )
    add_stand_in(parser)
    parser.add_argument("--width", type=common.whole_number(4, 4096), metavar="N", help="width of digits or char_gpt")
    parser.add_argument(
        "--batch",
        type=common.whole_number(1, 1000),
        metavar="N",
        help="batch size per host of digits or char_gpt (default: 8)",
    )
    parser.add_argument(
        "--rounds",
        type=common.whole_number(_ROUNDS_MIN, 10_000),
        default=5,
        metavar="N",
        help=f"number of rounds, in which each variant has one turn; at least {_ROUNDS_MIN} (default: 5)",
    )
    parser.add_argument(
        "--steps",
        type=common.whole_number(_STEPS_MIN, 10_000),
        default=4,
        metavar="N",
        help="number of steps of a turn; the first one is not counted (default: 4)",
    )
    parser.add_argument(
        "--in-flight",
        type=common.whole_number(1, 1000),
        default=1,
        metavar="N",
        help="largest number of gradcast's blocks in flight (default: 1)",
    )
    add_timeout_option(parser, 900)
    parser.add_argument("-o", "--output", metavar="PNG", help="draw the results")
    common.add_json_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    settings = _settings(args)
    check_machine(args)
    unwind_when_told_to_end()
    progress = sys.stderr if args.json else sys.stdout
    print(f"{settings.model}, {describe_network(settings)}: {', '.join(settings.names)}", file=progress, flush=True)
    results = train(settings, timeout_s=args.timeout, output=progress)
    table = table_of(results, settings)
    if args.json:
        common.print_json(as_json(table, results, settings))
    else:
        print(report(table, settings, results["parameter_bytes"]))
    if args.output:
        from gradcast.plots import draw_lab

        title = f"{describe_model(settings, results['parameter_bytes'])}, {describe_network(settings)}"
        draw_lab(args.output, table, title=title)
        print(f"The picture is in {args.output}.", file=progress)
    if table.wrong:
        names = ", ".join(row.name for row in table.wrong)
        raise Error(f"the parameters that {names} trained are not those of ddp", "internal")


def _settings(args: argparse.Namespace) -> Settings:
    rates = rates_of(args)
    real = args.model in REAL_MODELS
    foreign = ("forward_ms", "backward_ms", "scale_size") if real else ("width", "batch")
    for name in foreign:
        if getattr(args, name) is not None:
            option = "--" + name.replace("_", "-")
            raise Error(
                f"{option} only works with {'stand-ins' if real else 'real models'}, and {args.model} is not one"
            )
    profile = None if real else stand_in_profile(args)
    defaults = Settings(args.model, None, rates, tuple(args.compare))
    return Settings(
        model=args.model if profile is None else profile.name,
        profile=None if profile is None else profile.to_json(),
        rates_bits_per_s=rates,
        names=tuple(args.compare),
        scale_size=args.scale_size or defaults.scale_size,
        width=args.width,
        batch=args.batch or defaults.batch,
        rounds=args.rounds,
        steps=args.steps,
        in_flight=args.in_flight,
        latency_s=args.latency / 1e9,
    )
