"""``gradcast lab``: hosts with slow links on one machine, and training on them."""

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

from gradcast import _core
from gradcast.commands import common
from gradcast.errors import Error
from gradcast.files import bundled_profiles, check_writable, load_profile, scaled_profile
from gradcast.lab import Network, run_workers
from gradcast.lab.hosts import obstacle
from gradcast.lab.program import unwind_when_told_to_end
from gradcast.lab.report import model_words, network_words, report
from gradcast.lab.results import as_json, table_of
from gradcast.lab.settings import REAL_MODELS, Settings
from gradcast.lab.train import train
from gradcast.lab.variants import EXAMPLES, names_of
from gradcast.units import parse_bandwidth_bits_per_s, parse_positive

_RUN_EXAMPLE = "gradcast lab run --hosts 2 --rate 100mbit -- examples/digits.py --gradcast overlap"
_TRAIN_EXAMPLE = (
    "gradcast lab train --hosts 4 --rate 2gbit --model resnet50 --scale-size 0.25 \\\n"
    "    --forward-ms 200 --backward-ms 400 --compare ddp,ddp-near,hook,overlap -o lab.png"
)
_HOSTS_MAX = 250
_STEPS_MIN = 2
_ROUNDS_MIN = 2
_WHERE = """\
The hosts are network namespaces of this machine,
joined by links that tc slows down: this needs root, Linux and iproute2, and removes everything when it ends."""
_STAND_IN = f"""\
With a profile as --model, the workers train a timed
stand-in for an accelerator: a model with the profile's tensors that waits where an accelerator would compute. What is
sent, copied and updated is real. {_WHERE}"""


def add_parser(commands: Any) -> None:
    parser = common.new_parser(
        commands, "lab", "train on hosts with slow links, made on this machine", "", _TRAIN_EXAMPLE
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    _add_train(actions)
    _add_run(actions)


def _add_run(actions: Any) -> None:
    parser = common.new_parser(
        actions, "run", "run a training script once per host, as torchrun would", _WHERE, _RUN_EXAMPLE
    )
    _add_hosts_option(parser, default=2, help_="default: 2")
    _add_rate_option(parser, "100mbit")
    _add_timeout_option(parser, 600)
    parser.add_argument("script", nargs="+", metavar="SCRIPT", help="a Python script and its arguments, after --")
    parser.set_defaults(run=run_script)


def _add_train(actions: Any) -> None:
    parser = common.new_parser(
        actions, "train", "compare ways of sending gradients in real training", _STAND_IN, _TRAIN_EXAMPLE
    )
    number = common.argument(parse_positive)
    _add_hosts_option(parser, default=None, help_="default: 2, or as many as --rates has")
    _add_rate_option(parser, "1gbit")
    parser.add_argument(
        "--rates",
        type=_list_of_rates,
        metavar="RATES",
        help="of each host by itself, separated by commas: 2gbit,2gbit,1gbit",
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="NAME",
        help=f"{' or '.join(REAL_MODELS)}: trained for real; a profile (a JSON file, or one of "
        f"{', '.join(bundled_profiles())}): its stand-in",
    )
    parser.add_argument(
        "--compare",
        type=common.argument(names_of),
        default=names_of("ddp,hook,overlap"),
        metavar="NAMES",
        help=f"separated by commas, of {EXAMPLES}; alone and ddp always run (default: ddp,hook,overlap)",
    )
    parser.add_argument("--forward-ms", type=number, metavar="MS", help="stand-in: length of forward (profile's)")
    parser.add_argument("--backward-ms", type=number, metavar="MS", help="stand-in: length of backward (profile's)")
    parser.add_argument(
        "--scale-size", type=number, metavar="FACTOR", help="stand-in: multiply the bytes of every tensor (default: 1)"
    )
    parser.add_argument("--width", type=common.whole_number(4, 4096), metavar="N", help="of digits or char_gpt")
    parser.add_argument(
        "--batch", type=common.whole_number(1, 1000), metavar="N", help="of digits or char_gpt, per host (default: 8)"
    )
    parser.add_argument(
        "--rounds",
        type=common.whole_number(_ROUNDS_MIN, 10_000),
        default=5,
        metavar="N",
        help=f"in each, every variant has its turn; at least {_ROUNDS_MIN} (default: 5)",
    )
    parser.add_argument(
        "--steps",
        type=common.whole_number(_STEPS_MIN, 10_000),
        default=4,
        metavar="N",
        help="of a turn; the first one is not counted (default: 4)",
    )
    parser.add_argument(
        "--in-flight",
        type=common.whole_number(1, 1000),
        default=1,
        metavar="N",
        help="gradcast's blocks between launch and finish at the same time (default: 1)",
    )
    _add_timeout_option(parser, 900)
    parser.add_argument("-o", "--output", metavar="PNG", help="draw what was measured")
    common.add_json_option(parser)
    parser.set_defaults(run=run_train)


def _add_hosts_option(parser: argparse.ArgumentParser, *, default: int | None, help_: str) -> None:
    parser.add_argument("--hosts", type=common.whole_number(1, _HOSTS_MAX), default=default, metavar="N", help=help_)


def _add_rate_option(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--rate",
        type=common.argument(parse_bandwidth_bits_per_s),
        default=parse_bandwidth_bits_per_s(default),
        help=f"of each host's link, each way (default: {default})",
    )


def _add_timeout_option(parser: argparse.ArgumentParser, default_s: float) -> None:
    parser.add_argument(
        "--timeout",
        type=common.argument(parse_positive),
        default=default_s,
        metavar="SECONDS",
        help=f"end the run then (default: {default_s:g})",
    )


def _list_of_rates(text: str) -> tuple[float, ...]:
    return tuple(common.argument(parse_bandwidth_bits_per_s)(part) for part in text.split(","))


def run_script(args: argparse.Namespace) -> None:
    if not Path(args.script[0]).exists():
        raise Error(f"the script {args.script[0]} does not exist")
    unwind_when_told_to_end()
    with Network(args.hosts, args.rate) as network:
        run_workers(args.script, args.hosts, timeout_s=args.timeout, network=network)


def run_train(args: argparse.Namespace) -> None:
    settings = _settings(args)
    _check_place(args)
    unwind_when_told_to_end()
    progress = sys.stderr if args.json else sys.stdout
    print(f"{settings.model}, {network_words(settings)}: {', '.join(settings.names)}", file=progress, flush=True)
    results = train(settings, timeout_s=args.timeout, output=progress)
    table = table_of(results, settings)
    if args.json:
        common.print_json(as_json(table, results, settings))
    else:
        print(report(table, settings, results["parameter_bytes"]))
    if args.output:
        from gradcast.pictures import draw_lab

        title = f"{model_words(settings, results['parameter_bytes'])}, {network_words(settings)}"
        draw_lab(args.output, table, title=title)
        print(f"The picture is in {args.output}.", file=progress)
    if table.wrong:
        names = ", ".join(row.name for row in table.wrong)
        raise Error(f"the parameters that {names} trained are not those of ddp", "internal")


def _settings(args: argparse.Namespace) -> Settings:
    hosts = args.hosts or len(args.rates or (0, 0))
    rates = args.rates or (args.rate,) * hosts
    if len(rates) != hosts:
        raise Error(f"--rates has {len(rates)} rates for {hosts} hosts; write one for each")
    if hosts < 2:
        raise Error("one host sends nothing; ask for 2 or more with --hosts")
    real = args.model in REAL_MODELS
    foreign = ("forward_ms", "backward_ms", "scale_size") if real else ("width", "batch")
    for name in foreign:
        if getattr(args, name) is not None:
            option = "--" + name.replace("_", "-")
            raise Error(f"{option} is an option of {'stand-ins' if real else 'real models'}, and {args.model} is none")
    profile = None if real else _profile(args)
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
    )


def _profile(args: argparse.Namespace) -> _core.Profile:
    """The stand-in's, with the lengths of forward and backward that were asked for."""
    try:
        profile = load_profile(args.model)
    except Error as error:
        raise Error(f"{error}; {' and '.join(REAL_MODELS)} are trained for real") from None
    forward_factor = args.forward_ms * 1e6 / profile.forward_ns if args.forward_ms else 1.0
    backward_factor = args.backward_ms * 1e6 / profile.backward_ns if args.backward_ms else 1.0
    return scaled_profile(profile, forward_factor, backward_factor=backward_factor)


def _check_place(args: argparse.Namespace) -> None:
    """Before anything runs, not after minutes of training."""
    if reason := obstacle():
        raise Error(reason)
    if importlib.util.find_spec("torch") is None:
        raise Error("gradcast lab train needs PyTorch, which is not installed: pip install torch")
    if args.output:
        check_writable(args.output, "picture")
        importlib.import_module("gradcast.pictures")  # says itself what it lacks
