"""What it brings to choose a plan by the measured steps instead of by their medians.

    python -m benchmarks.plan_choice --model char_gpt --rate 200mbit --batch 24 [--hosts 2] [--rounds 20]
    python -m benchmarks.plan_choice --model resnet50 --rate 60mbit --scatter 0.05

One training measures a profile and how much its steps differ. Two plans are made for that: the best one for the
profile, and the one that training would follow. If they differ, two copies of the model follow one plan each, in turns.
Real models compute on the CPU; a profile's name is trained by a stand-in (200 ms of backward, 100 of forward, 6 MB of
gradients), whose compute with ``--scatter`` differs from step to step and rank to rank. Needs root and iproute2.
"""

import argparse
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tabulate import tabulate

import gradcast
from benchmarks.on_hosts import in_turns, measured, parser_of, spread
from benchmarks.pages import run_program
from gradcast import _core
from gradcast.comparison.compare import total_bytes
from gradcast.files import load_profile, plan_hash, scaled_profile
from gradcast.lab.models import StandInTask, Task, make_task
from gradcast.lab.settings import REAL_MODELS, Settings
from gradcast.lab.trainer import Training, attached
from gradcast.training import observe
from gradcast.training.plan.agreement import plan_text
from gradcast.training.plan.candidates import best_for_steps, choose_plan
from gradcast.training.plan.expectation import StepVariation, typical_step

_GRADIENT_BYTES = 6e6
_BACKWARD_NS, _FORWARD_NS = 200e6, 100e6
_SETTLING_STEPS = gradcast.Planning().warmup_steps + observe.CALIBRATION_STEPS + 4
_PLANS = ("for medians", "for the steps")


def settings_of(args: argparse.Namespace) -> Settings:
    if args.model in REAL_MODELS:
        return Settings(args.model, batch=args.batch)
    profile = load_profile(args.model)
    backward_factor = _BACKWARD_NS / profile.backward_ns
    profile = scaled_profile(
        profile, _FORWARD_NS / profile.forward_ns, backward_factor=backward_factor, update_factor=1
    )
    return Settings(args.model, profile.to_json(), scale_size=_GRADIENT_BYTES / total_bytes(profile))


def started(task: Task, scatter: float, plan: str | None = None) -> Training:
    """A copy of the model; a stand-in has another speed in each step."""
    training, chance = attached(task, plan=gradcast.Planning(file=plan)), random.Random(dist.get_rank())

    def change_speed() -> None:
        task.device.factor = max(0.5, chance.gauss(1.0, scatter))

    if isinstance(task, StandInTask):
        training.after_step = change_speed
    training.turn(_SETTLING_STEPS)
    return training


def made_plans(profile: _core.Profile, variation: StepVariation, folder: str) -> list[dict[str, Any]]:
    """Both plans, each saved in a file."""
    options = gradcast.Options()
    plans = (choose_plan(profile, "overlap", options), best_for_steps(profile, ("overlap",), variation, options))
    found = []
    for name, plan in zip(_PLANS, plans, strict=True):
        path = Path(folder) / f"{name}.json"
        path.write_text(plan_text(plan, profile, None))
        at_links = [
            typical_step(profile, plan, variation.compute, factor).step_ns / 1e6 for factor in (1.0, *variation.link)
        ]
        predicted_ms = statistics.mean(at_links)
        made_hash = plan_hash(plan, profile)
        found.append({"path": str(path), "hash": made_hash, "blocks": len(plan.blocks), "ms": predicted_ms})
    return found


def train(settings: Settings, args: argparse.Namespace) -> dict[str, Any]:
    """One rank."""
    own = dist.get_rank()
    with tempfile.TemporaryDirectory() as folder:
        task = make_task(settings, own)
        measuring = started(task, args.scatter)
        profile, variation = measuring.handle.profile, observe.variation(measuring.handle)
        told: list[Any] = [made_plans(profile, variation, folder) if own == 0 else None]
        dist.broadcast_object_list(told)
        plans = told[0]
        measuring.detach()
        times_ms: list[list[float]] = [[], []]
        if plans[0]["hash"] != plans[1]["hash"]:
            trainings = [started(task, args.scatter, plan["path"]) for plan in plans]
            for index in in_turns((0, 1), args.rounds):
                times_ms[index] += trainings[index].turn(args.steps)
    return {"plans": plans, "times_ms": times_ms, "link": variation.link, "compute": variation.compute}


def table(facts: dict[str, Any]) -> str:
    rows = []
    for name, plan, times in zip(_PLANS, facts["plans"], facts["times_ms"], strict=True):
        told = [*spread(times), f"{statistics.mean(times):.1f}"] if times else ["-"] * 3
        rows.append([name, plan["blocks"], f"{plan['ms']:.1f}", *told])
    head = ["plan", "blocks", "predicted ms", "median ms", "80 % of steps", "mean ms"]
    return tabulate(rows, headers=head, tablefmt="github", disable_numparse=True)


def main() -> None:
    parser = parser_of(__doc__, rate="200mbit")
    parser.add_argument("--model", required=True, help=f"{' or '.join(REAL_MODELS)}, or a profile's name")
    parser.add_argument("--batch", type=int, default=24, help="of a real model (default: 24)")
    parser.add_argument("--scatter", type=float, default=0.0, help="of a stand-in's compute, a share (default: 0)")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each plan (default: 20)")
    parser.add_argument("--steps", type=int, default=5, help="per turn; the first is not counted (default: 5)")
    args = parser.parse_args()
    settings = settings_of(args)
    facts = measured(train, args.hosts, args.rate, settings, args, promptly=settings.stand_in)
    low, high = facts["link"]
    print(f"{args.model}, {args.hosts} hosts: 80 % of the blocks take {low:.2f} to {high:.2f} of the profile's time,")
    print("backward takes", ", ".join(f"{backward:.2f}" for backward, _, _ in facts["compute"]), "of it")
    print(table(facts))
    if not facts["times_ms"][0]:
        print("Both plans are the same.")


if __name__ == "__main__":
    sys.exit(run_program(main, "plan_choice"))
