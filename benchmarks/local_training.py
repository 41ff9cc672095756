"""What local steps change in what a model learns: char_gpt trained as DDP trains it and with local steps, from the same
parameters and on the same texts.

    python -m benchmarks.local_training [--steps 3000] [--batch 2] [--seeds 5] [--every 30,50]

Runs that the record holds are not repeated. One process trains the models of all ranks, with the reference whose bits
gradcast has on two ranks (tests/training/local/test_rounds.py). Every rank draws the same number of texts in each
variant, so losses are compared at equal tokens. SGD with momentum, a one-cycle schedule of the
learning rate. The last tenth of the text is held out; with local steps the global copy is measured after
``handle.end_round()``.
"""

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.int8_training import char_gpt
from benchmarks.pages import append, parser_of, read_record, run_program, show

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from training.local.reference import Reference

_RATE = 0.2  # with which SGD learns most in some hundred steps; AdamW stays at a loss of 3.0 for as long
_DDP = "DDP"


class Recipe:
    """An optimizer of each rank, and its schedule."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self.schedulers: list[torch.optim.lr_scheduler.OneCycleLR] = []

    def __call__(self, module: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(module.parameters(), lr=_RATE, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=self._steps, cycle_momentum=False)
        self.schedulers.append(schedule)
        return optimizer


def loss_of(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(module(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def held_out_loss(module: nn.Module, held_out: tuple[torch.Tensor, torch.Tensor]) -> float:
    sums = 0.0
    for inputs, targets in zip(*(each.split(64) for each in held_out), strict=True):
        sums += loss_of(module, inputs, targets).item() * targets.numel()
    return sums / held_out[1].numel()


def update(module: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    optimizer.zero_grad()
    loss_of(module, *batch).backward()
    optimizer.step()


def train(settings: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(settings["seed"])
    ranks, every = settings["ranks"], settings["every"]
    job = char_gpt(settings["batch"])
    module, recipe = job.module(), Recipe(settings["steps"])
    chances = [torch.Generator().manual_seed(1000 * settings["seed"] + rank) for rank in range(ranks)]
    start = time.perf_counter()
    if settings["outer"] == _DDP:
        optimizer = recipe(module)
        for _ in range(settings["steps"]):
            inputs, targets = zip(*(job.draw(chance) for chance in chances), strict=True)
            update(module, optimizer, (torch.cat(inputs), torch.cat(targets)))
            recipe.schedulers[0].step()
    else:
        reference = Reference(module, recipe, ranks, every, settings["overlap"], settings["outer"])
        for _ in range(settings["steps"]):
            for chance, own, optimizer, scheduler in zip(
                chances, reference.modules, reference.optimizers, recipe.schedulers, strict=True
            ):
                update(own, optimizer, job.draw(chance))
                scheduler.step()
            reference.after_step()
        reference.end()
        module = reference.modules[0]
    return settings | {"loss": held_out_loss(module, job.held_out), "seconds": round(time.perf_counter() - start)}


def name_of(run: dict[str, Any]) -> str:
    if run["outer"] == _DDP:
        return _DDP
    form = "blocking" if run["overlap"] == 0 else "streamed"
    return f"{run['outer']}, {form}, H = {run['every']}"


def table(runs: list[dict[str, Any]]) -> str:
    """Differences are paired by seed."""
    plain = {run["seed"]: run["loss"] for run in runs if run["outer"] == _DDP}
    rows = []
    for name in dict.fromkeys(map(name_of, runs)):
        own = {run["seed"]: run["loss"] for run in runs if name_of(run) == name and run["seed"] in plain}
        shares = [own[seed] / plain[seed] - 1 for seed in sorted(own)]
        told = "-" if name == _DDP else ", ".join(f"{each:+.2%}" for each in shares)
        rows.append([name, len(own), f"{statistics.mean(own.values()):.4f}", told])
    head = ["training", "seeds", "held-out loss, mean", "over DDP's, by seed"]
    return tabulate(rows, headers=head, tablefmt="github", disable_numparse=True)


def variants(every: list[int]) -> list[dict[str, Any]]:
    streamed = [{"outer": outer, "overlap": None} for outer in ("nesterov", "average")]
    found = [{"every": each, **form} for each in every for form in streamed]
    return [{"every": 1, "outer": _DDP, "overlap": None}, *found]


def main() -> int:
    parser = parser_of(__doc__, "local_training.jsonl")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2, help="texts of each rank and step (default: 2)")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--every", default="30,50", help="H, in steps (default: 30,50)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    wanted = {name: getattr(args, name) for name in ("ranks", "batch", "steps")}
    every = [int(each) for each in args.every.split(",")]
    keys = [wanted | each | {"seed": seed} for seed in range(args.seeds) for each in variants(every)]
    for key in keys:
        if not any(key.items() <= known.items() for known in read_record(args.record)):
            append(args.record, run := train(key))
            print(f"seed {run['seed']}, {name_of(run)}: {run['loss']:.4f} in {run['seconds']} s", file=sys.stderr)
    runs = [run for run in read_record(args.record) if any(key.items() <= run.items() for key in keys)]
    show(table(runs), "local-training", args.refresh)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main, "local_training"))
