"""Other numbers of workers after a restart: is the plan there from the first step, and is its prediction right?

    python -m benchmarks.elastic_workers [--hosts 8,6,8] [--rate 200mbit] [--steps 30]

A timed stand-in of ResNet-50 on hosts with slow links (root, iproute2). Each training after the first begins with the
handle.state_dict() of the one before, as after an elastic restart.
"""

import argparse
import logging
import statistics
import sys
from typing import Any

import torch.distributed as dist
from tabulate import tabulate

from benchmarks.on_hosts import measured, parser_of
from benchmarks.pages import run_program
from gradcast.files import load_profile
from gradcast.lab.models import StandInTask
from gradcast.lab.settings import Settings
from gradcast.lab.trainer import attached

_CALIBRATION_STEPS = 9  # of a new plan, that may correct it
_LEFT_OUT = 2  # the first steps open TCP's windows


def train(args: argparse.Namespace, state: dict[str, Any] | None) -> dict[str, Any]:
    """One rank: its steps, and the state for the next training."""
    own = dist.get_rank()
    if own == 0:
        logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
    profile = load_profile("resnet50", args.scale).to_json()
    task = StandInTask(Settings("resnet50", profile, scale_size=args.scale_size), own)
    training = attached(task)
    handle = training.handle
    if state is not None:
        handle.load_state_dict(state if own == 0 else {})
    steps = [
        {"ms": ms, "predicted_ms": handle.stats()["predicted_ms"], "measures": handle.measuring}
        for ms in training.steps(task.batches(0, args.steps))
    ]
    state = handle.state_dict()
    handle.detach()
    return {"steps": steps, "state": state}


def row(hosts: int, steps: list[dict[str, Any]]) -> list[Any]:
    """The first steps of the first plan against what it promised, and what the last one promises against the rest."""
    first = next(number for number, step in enumerate(steps) if not step["measures"])
    cells: list[Any] = [hosts, first]
    for begin, end in ((first + _LEFT_OUT, first + _CALIBRATION_STEPS), (first + _CALIBRATION_STEPS + 1, len(steps))):
        times_ms = [step["ms"] for step in steps[begin:end]]
        took_ms, predicted_ms = statistics.median(times_ms), steps[begin]["predicted_ms"]
        spread = f"{min(times_ms):.1f} to {max(times_ms):.1f}"
        cells += [f"{predicted_ms:.1f}", f"{took_ms:.1f}", spread, f"{predicted_ms / took_ms - 1:+.1%}"]
    return cells


def main() -> None:
    parser = parser_of(__doc__, rate="200mbit", hosts=None)
    parser.add_argument("--hosts", type=lambda text: [int(each) for each in text.split(",")], default=[8, 6, 8])
    parser.add_argument("--scale", type=float, default=1.0, help="of the stand-in's compute")
    parser.add_argument("--scale-size", type=float, default=0.04, help="of its gradients")
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    rows, state = [], None
    for hosts in args.hosts:
        facts = measured(train, hosts, args.rate, args, state, promptly=True)
        state = facts["state"]
        rows.append(row(hosts, facts["steps"]))
    again = ["predicted, ms", "took, ms", "range", "off by"]
    print(tabulate(rows, ["hosts", "steps without a plan", *again, *again], disable_numparse=True))


if __name__ == "__main__":
    sys.exit(run_program(main, "elastic_workers"))
