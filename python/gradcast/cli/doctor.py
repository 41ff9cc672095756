"""``gradcast doctor``: why is this training as slow as it is, and what would help, by how much?"""

import argparse
import os
from typing import Any

from gradcast.cli import common
from gradcast.errors import Error
from gradcast.units import parse_positive

_EXAMPLE = "torchrun --nproc-per-node 2 -m gradcast doctor train.py --epochs 3"
_STEPS_MAX = 100_000


def add_parser(commands: Any) -> None:
    parser = common.new_parser(
        commands,
        "doctor",
        "find out why a training is slow and what would help",
        "Runs your script, which stays as it is, watches its steps, and then, once, makes some of its own: with less\n"
        "communication, without data, with gradcast. Afterwards the training goes on from the very state that it had.",
        _EXAMPLE,
    )
    parser.add_argument(
        "--steps",
        type=common.whole_number(5, _STEPS_MAX),
        default=20,
        metavar="N",
        help="ordinary steps to watch, after the first 5 (default: 20)",
    )
    parser.add_argument(
        "--seconds",
        type=common.argument(parse_positive),
        default=60.0,
        metavar="S",
        help="about so long may the steps take that are not the script's (default: 60)",
    )
    parser.add_argument("--no-network", action="store_true", help="leave out the check of the network")
    parser.add_argument("--no-trial", action="store_true", help="do not try gradcast; nothing is predicted then")
    parser.add_argument("--stop", action="store_true", help="end the script after the diagnosis, with exit code 0")
    parser.add_argument(
        "-o", "--output", default="gradcast-doctor", metavar="DIR", help="where the result goes (default: %(default)s)"
    )
    common.add_json_option(parser)
    parser.add_argument("script", metavar="SCRIPT", help="a training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its own arguments")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        raise Error("gradcast doctor needs PyTorch, which is not installed: pip install torch") from None
    from gradcast.diagnosis import script
    from gradcast.diagnosis.doctor import Settings
    from gradcast.diagnosis.outcome import Outcome

    settings = Settings(steps=args.steps, seconds=args.seconds, network=not args.no_network, trial=not args.no_trial)
    rank = int(os.environ.get("RANK", "0"))
    outcome = Outcome(args.output, rank=rank, script=args.script, as_json=args.json, ends=args.stop)
    script.run(args.script, args.arguments, settings, outcome)
