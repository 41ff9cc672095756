"""Whether int8 on the wire changes what a model learns: models trained with fp32, with int8, and with int8 without its
error feedback, from the same parameters and on the same batches.

    python -m benchmarks.int8_training char_gpt --batch 4 [--seeds 5] [-o picture.png]
    python -m benchmarks.int8_training digits --steps 400

Runs that the record holds are not repeated.

One process computes the gradients of all ranks, and averages them as tests/training/int8_mean.py does, which has
gradcast's bits (tests/training/step/test_wire.py). A seed decides the parameters, and what each rank draws. Differences
are paired by seed; the standard error is that of their mean.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.pages import RESULTS, append, find_run, read_record
from gradcast.lab.models import load_example
from gradcast.palette import CURVES

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from training.int8_mean import Int8Mean, added

VARIANTS = ("fp32", "int8", "int8 without feedback")
HELD_OUT_BATCH = 64


@dataclass(frozen=True)
class Job:
    """A model, its batches and its measure, which is better if it is smaller."""

    module: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    draw: Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]
    held_out: tuple[torch.Tensor, torch.Tensor]
    measure: str  # "loss" or "error %"


def _sgd(rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda module: torch.optim.SGD(module.parameters(), lr=rate, momentum=0.9)


def char_gpt(batch: int, width: int = 128) -> Job:
    """The last tenth of the text is held out."""
    example = load_example("char_gpt")
    text, context = example.load_text(), example.CONTEXT
    trained = len(text) * 9 // 10

    def texts_at(starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        texts = text[starts[:, None] + torch.arange(context + 1)]
        return texts[:, :-1], texts[:, 1:]

    return Job(
        lambda: example.GPT(width),
        _sgd(0.2),  # with which this model learns most in some hundred steps
        lambda chance: texts_at(torch.randint(trained - context, (batch,), generator=chance)),
        texts_at(torch.arange(trained, len(text) - context, context)[:256]),
        "loss",
    )


def digits(batch: int) -> Job:
    example = load_example("digits")
    images, targets = example.load_data()
    trained = len(images) - example.TEST_COUNT

    def draw(chance: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.randint(trained, (batch,), generator=chance)
        return images[chosen], targets[chosen]

    return Job(example.make_model, _sgd(0.05), draw, (images[trained:], targets[trained:]), "error %")


JOBS = {"char_gpt": char_gpt, "digits": digits}


def chances(seed: int, ranks: int) -> list[torch.Generator]:
    """With which the ranks draw what they train on."""
    return [torch.Generator().manual_seed(1000 * seed + rank) for rank in range(ranks)]


def loss_of(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(module(inputs).flatten(0, targets.dim() - 1), targets.flatten())


@torch.no_grad()
def held_out_measure(job: Job, module: nn.Module) -> float:
    sums = 0.0
    for inputs, targets in zip(*(each.split(HELD_OUT_BATCH) for each in job.held_out), strict=True):
        if job.measure == "loss":
            sums += loss_of(module, inputs, targets).item() * targets.numel()
        else:
            sums += 100.0 * int((module(inputs).argmax(1) != targets).sum())
    return sums / job.held_out[1].numel()


class Training:
    """One model as ``ranks`` ranks would train it."""

    def __init__(self, job: Job, variant: str, seed: int, ranks: int) -> None:
        torch.manual_seed(seed)
        self._job, self._ranks = job, ranks
        self.module = job.module()
        self._parameters = list(self.module.parameters())
        self._optimizer = job.optimizer(self.module)
        self._chances = chances(seed, ranks)
        has_feedback = variant == "int8"
        self._int8 = None if variant == "fp32" else Int8Mean(self._parameters, ranks, has_feedback=has_feedback)

    def step(self) -> None:
        gradients = []
        for chance in self._chances:
            inputs, targets = self._job.draw(chance)
            gradients.append(torch.autograd.grad(loss_of(self.module, inputs, targets), self._parameters))
        with torch.no_grad():
            for index, (parameter, *own) in enumerate(zip(self._parameters, *gradients, strict=True)):
                if self._int8 is None:
                    parameter.grad = added([each * (1 / self._ranks) for each in own])
                else:
                    parameter.grad = self._int8.of(index, own)
        self._optimizer.step()


def train(args: argparse.Namespace, variant: str, seed: int) -> list[float]:
    """What is measured before the first step and after each ``args.every``."""
    job = JOBS[args.model](args.batch)
    training = Training(job, variant, seed, args.ranks)
    curve = [held_out_measure(job, training.module)]
    for number in range(1, args.steps + 1):
        training.step()
        if number % args.every == 0:
            curve.append(held_out_measure(job, training.module))
    return curve


def table(runs: list[dict[str, Any]]) -> str:
    rows = []
    ends = {(run["variant"], run["seed"]): run["curve"][-1] for run in runs}
    seeds = sorted({seed for _, seed in ends})
    for variant in VARIANTS:
        values = [ends[variant, seed] for seed in seeds]
        differences = [ends[variant, seed] - ends["fp32", seed] for seed in seeds]
        error = statistics.stdev(differences) / math.sqrt(len(seeds))
        middle = statistics.mean(differences)
        in_errors = f"{abs(middle) / error:.1f}" if error > 0 else "-"
        told = ["-", "-"] if variant == "fp32" else [f"{middle:+.4f} ± {error:.4f}", in_errors]
        each_told = ", ".join(f"{each:+.4f}" for each in differences)
        rows.append([variant, f"{statistics.mean(values):.4f}", *told, each_told])
    head = ["wire", "held out, mean", "difference to fp32 ± standard error", "in standard errors", "by seed"]
    return tabulate(rows, headers=head, tablefmt="github", disable_numparse=True)


def draw(path: str, runs: list[dict[str, Any]]) -> None:
    """Above what fp32 learns, below how far the others are from it, seed by seed and as a mean."""
    from gradcast.plots.canvas import draw_grid, plt, save

    figure, (above, below) = plt.subplots(2, figsize=(6.2, 4.2), sharex=True, layout="constrained")
    steps = [runs[0]["every"] * number for number in range(len(runs[0]["curve"]))]
    plain = {run["seed"]: run["curve"] for run in runs if run["variant"] == "fp32"}
    for curve in plain.values():
        above.plot(steps, curve, color=CURVES[-1], linewidth=0.8)
    for variant, color in zip(VARIANTS[1:], CURVES, strict=False):
        differences = [
            [own - other for own, other in zip(run["curve"], plain[run["seed"]], strict=True)]
            for run in runs
            if run["variant"] == variant
        ]
        for curve in differences:
            below.plot(steps, curve, color=color, linewidth=0.5, alpha=0.6)
        means = [statistics.mean(each) for each in zip(*differences, strict=True)]
        below.plot(steps, means, color=color, label=variant)
    above.set_ylabel("fp32, held out")
    below.set_ylabel("difference to fp32")
    below.set_xlabel("step")
    below.legend(frameon=False)
    for axes in (above, below):
        draw_grid(axes)
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=JOBS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="of each rank (default: 8)")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--every", type=int, default=50, help="steps between two measurements (default: 50)")
    parser.add_argument("--record", type=Path, default=RESULTS / "int8_training.jsonl", metavar="JSONL")
    parser.add_argument("-o", "--output", metavar="PICTURE", help="draw it")
    args = parser.parse_args()
    if args.seeds < 2:
        parser.error("--seeds has to be at least 2: one difference has no standard error")
    torch.set_num_threads(1)
    wanted = {name: getattr(args, name) for name in ("model", "ranks", "batch", "steps", "every")}
    record, runs = read_record(args.record), []
    for seed in range(args.seeds):
        for variant in VARIANTS:
            key = wanted | {"variant": variant, "seed": seed}
            run = find_run(record, key)
            if run is None:
                run = key | {"curve": train(args, variant, seed)}
                append(args.record, run)
                print(f"{args.model}, seed {seed}, {variant}: {run['curve'][-1]:.4f}", flush=True)
            runs.append(run)
    print(table(runs))
    if args.output:
        draw(args.output, runs)


if __name__ == "__main__":
    main()
