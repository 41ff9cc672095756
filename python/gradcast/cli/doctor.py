"""``gradcast doctor``: why a training is slow, and what would help by how much."""

import argparse
import os
from typing import Any

from gradcast.cli import common

_STEPS_MAX = 100_000


def add_parser(commands: Any) -> None:
    parser = common.command(
        commands,
        "doctor",
        "find out why a training is slow and what would help",
        "Runs your unchanged script and observes its steps. Then it pauses the training once and runs its own "
        "steps: with less communication, without data loading, with gradcast. Afterwards it restores the state bit "
        "for bit.",
        "torchrun --nproc-per-node 2 -m gradcast doctor train.py --epochs 3",
    )
    steps = "number of ordinary steps to observe after 5 warm-up steps"
    common.option(parser, "--steps", "N", steps, common.whole_number(5, _STEPS_MAX), "20")
    common.option(
        parser, "--duration", "TIME", "time for the doctor's own steps, approximately", common.DURATION, "60s"
    )
    parser.add_argument("--no-network", action="store_true", help="do not check the network")
    parser.add_argument(
        "--no-trial", action="store_true", help="do not try gradcast; nothing that needs a profile is predicted then"
    )
    parser.add_argument("--stop", action="store_true", help="end the script after the diagnosis, with exit code 0")
    common.option(parser, "-o, --output", "DIR", "folder of the result", common.not_empty, "gradcast-doctor")
    common.add_json_option(parser)
    parser.add_argument("script", metavar="SCRIPT", help="training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    common.require_torch("gradcast doctor")
    options = {"steps": args.steps, "seconds": args.duration}
    options |= {"network": not args.no_network, "trial": not args.no_trial}
    rank = common.environment_number("RANK", 0, common.WORKERS_MAX - 1) if "RANK" in os.environ else 0
    from gradcast.diagnosis import script
    from gradcast.diagnosis.outcome import Outcome

    outcome = Outcome(args.output, rank=rank, script=args.script, as_json=args.json, ends=args.stop)
    script.run(args.script, args.arguments, outcome, **options)
