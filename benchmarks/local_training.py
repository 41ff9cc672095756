"""What local steps change in what a model learns: char_gpt trained as DDP trains it and with local steps, from the same
parameters and on the same texts.

    python -m benchmarks.local_training [--steps 3000] [--batch 2] [--seeds 5] [--every 30,50]
    python -m benchmarks.local_training --rate 50mbit -o picture.png    # root, iproute2

Runs that the record holds are not repeated. One process trains the models of all ranks, with the references whose bits
gradcast has on two ranks (tests/training/local/test_rounds.py, tests/training/step/test_wire.py). Every rank draws the
same number of texts in each variant, so losses are compared at equal tokens. The last tenth of the text is held out;
with local steps the global copy is measured, at the end after ``handle.end_round()``.

With ``--rate`` hosts with links of that rate train each variant for some rounds, and the picture shows the loss over
the time that the steps take there.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn
from torch.nn.functional import cross_entropy

import gradcast
from benchmarks.int8_training import char_gpt
from benchmarks.on_hosts import add_worker, measured, one_rank, write
from benchmarks.pages import append, parser_of, read_record, run_program, show
from gradcast.lab.models import make_task
from gradcast.lab.settings import Settings
from gradcast.palette import CURVES
from gradcast.units import parse_bandwidth_bits_per_s

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from training.int8_mean import Int8Mean
from training.local.reference import Narrow, Reference, averaged

_DDP, _ALONE = "DDP", "one rank alone"
_RATES = {_DDP: 0.4, _ALONE: 0.4, "nesterov": 0.2, "average": 0.2}  # of SGD
_MEASURED_EVERY = 250  # steps
_WARMUP_STEPS = 24
_TIMED_STEPS = 20


class Recipe:
    """An optimizer of each rank, and its schedule."""

    def __init__(self, steps: int, rate: float) -> None:
        self._steps, self._rate = steps, rate
        self.schedulers: list[torch.optim.lr_scheduler.OneCycleLR] = []

    def __call__(self, module: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(module.parameters(), lr=self._rate, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self._rate, total_steps=self._steps, cycle_momentum=False
        )
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


class Synchronous:
    """One model with the mean of all ranks' gradients."""

    def __init__(self, module: nn.Module, recipe: Recipe, ranks: int, wire: str) -> None:
        self.module, self._recipe, self._optimizer = module, recipe, recipe(module)
        self._parameters = list(module.parameters())
        self._int8 = Int8Mean(self._parameters, ranks) if wire == "int8" else None

    def step(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        if self._int8 is None:
            inputs, targets = (torch.cat(each) for each in zip(*batches, strict=True))
            self._optimizer.zero_grad()
            loss_of(self.module, inputs, targets).backward()
        else:
            own = [torch.autograd.grad(loss_of(self.module, *each), self._parameters) for each in batches]
            for index, (parameter, *gradients) in enumerate(zip(self._parameters, *own, strict=True)):
                parameter.grad = self._int8.of(index, gradients)
        self._optimizer.step()
        self._recipe.schedulers[0].step()

    def end(self) -> nn.Module:
        return self.module


class Local:
    """A model of each rank."""

    def __init__(self, module: nn.Module, recipe: Recipe, settings: dict[str, Any]) -> None:
        kind = Narrow if settings["wire"] == "int8" else Reference
        arguments = (settings[name] for name in ("ranks", "every", "overlap", "outer"))
        self._reference, self._recipe, self._measured = kind(module, recipe, *arguments), recipe, module
        if settings["wire"] == "int8":
            self._reference.use("int8", dict.fromkeys(range(len(self._reference.parts)), 0))

    @property
    def module(self) -> nn.Module:
        for each, value in zip(averaged(self._measured)[0], self._reference.values, strict=True):
            each.copy_(value)
        return self._measured

    def step(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        reference = self._reference
        for batch, own, optimizer, scheduler in zip(
            batches, reference.modules, reference.optimizers, self._recipe.schedulers, strict=True
        ):
            optimizer.zero_grad()
            loss_of(own, *batch).backward()
            optimizer.step()
            scheduler.step()
        reference.after_step()

    def end(self) -> nn.Module:
        self._reference.end()
        return self._reference.modules[0]


def train(settings: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(settings["seed"])
    job = char_gpt(settings["batch"], settings["width"])
    module, recipe = job.module(), Recipe(settings["steps"], settings["rate"])
    ranks = 1 if settings["outer"] == _ALONE else settings["ranks"]
    chances = [torch.Generator().manual_seed(1000 * settings["seed"] + rank) for rank in range(ranks)]
    start = time.perf_counter()
    training: Synchronous | Local
    if settings["outer"] in (_DDP, _ALONE):
        training = Synchronous(module, recipe, ranks, settings["wire"])
    else:
        training = Local(module, recipe, settings)
    curve = []
    for step in range(settings["steps"]):
        if step % _MEASURED_EVERY == 0:
            curve.append(held_out_loss(training.module, job.held_out))
        training.step([job.draw(chance) for chance in chances])
    curve.append(held_out_loss(training.end(), job.held_out))
    return settings | {"curve": curve, "seconds": round(time.perf_counter() - start)}


def name_of(run: dict[str, Any]) -> str:
    local = f"{'' if run['outer'] == 'nesterov' else 'average, '}H = {run['every']}"
    name = run["outer"] if run["outer"] in (_DDP, _ALONE) else local
    return f"{name}, int8" if run["wire"] == "int8" else name


def table(runs: list[dict[str, Any]]) -> str:
    """Differences are paired by seed."""
    plain = {run["seed"]: run["curve"][-1] for run in runs if name_of(run) == _DDP}
    rows = []
    for name in dict.fromkeys(map(name_of, runs)):
        own = {run["seed"]: run["curve"][-1] for run in runs if name_of(run) == name and run["seed"] in plain}
        shares = [own[seed] / plain[seed] - 1 for seed in sorted(own)]
        told = (
            ["-", "-"]
            if name == _DDP
            else [f"{statistics.mean(shares):+.2%}", ", ".join(map("{:+.2%}".format, shares))]
        )
        rows.append([name, len(own), f"{statistics.mean(own.values()):.4f}", *told])
    head = ["training", "seeds", "held-out loss, mean", "over DDP's, mean", "by seed"]
    return tabulate(rows, headers=head, tablefmt="github", disable_numparse=True)


def variants(every: list[int]) -> list[dict[str, Any]]:
    plain = {"every": 1, "outer": _DDP, "overlap": None, "wire": "fp32"}
    found = [plain, plain | {"outer": _ALONE}, plain | {"wire": "int8"}]
    found += [plain | {"every": each, "outer": outer} for each in every for outer in ("nesterov", "average")]
    found.append(plain | {"every": every[-1], "outer": "nesterov", "wire": "int8"})
    return [each | {"rate": _RATES[each["outer"]]} for each in found]


# --- How long its steps take on hosts with slow links ---


def attached(run: dict[str, Any], module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
    """What the program calls, and the handle, None for stock DDP."""
    if run["outer"] == _DDP and run["wire"] == "fp32":
        return nn.parallel.DistributedDataParallel(module), None
    options = {"wire": run["wire"]}
    if run["outer"] != _DDP:
        options |= {"sync_every": run["every"], "outer": run["outer"], "outer_overlap": run["overlap"]}
    return module, gradcast.attach(module, optimizer, options=gradcast.Options(**options))


def step_s(run: dict[str, Any]) -> float:
    """How long a step of this rank takes: the mean over whole rounds, all updates included."""
    task = make_task(Settings("char_gpt", None, (1.0,), (), width=run["width"], batch=run["batch"]), dist.get_rank())
    module = task.module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    called, handle = attached(run, module, optimizer)

    def steps(count: int) -> float:
        start = time.perf_counter()
        for inputs, targets in task.batches(0, count):
            optimizer.zero_grad()
            task.loss(called(inputs), targets).backward()
            optimizer.step()
        if handle is not None:
            handle.flush()
        return (time.perf_counter() - start) / count

    steps(max(2 * run["every"], 1 if handle is None else _WARMUP_STEPS))
    found = steps(run["every"] * -(-_TIMED_STEPS // run["every"]))
    if handle is not None:
        handle.detach()
    return found


def draw(path: str, runs: list[dict[str, Any]], steps_s: list[float]) -> None:
    """The held-out loss over the time of the steps."""
    from gradcast.plots.canvas import draw_grid, plt, save

    figure, axes = plt.subplots(figsize=(6.2, 3.4), layout="constrained")
    for run, each_s, color in zip(runs, steps_s, CURVES, strict=False):
        steps = [*range(0, run["steps"], _MEASURED_EVERY), run["steps"]]
        label = f"{name_of(run)}: {1e3 * each_s:.0f} ms a step"
        axes.plot([step * each_s / 60 for step in steps], run["curve"], color=color, label=label, marker=".")
    axes.set_xscale("log")
    axes.set_xlabel("minutes")
    axes.set_ylabel("held-out loss")
    axes.legend(frameon=False)
    draw_grid(axes)
    save(figure, path)


def main() -> int:
    parser = parser_of(__doc__, "local_training.jsonl")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2, help="texts of each rank and step (default: 2)")
    parser.add_argument("--width", type=int, default=128, help="of the model (default: 128, as in the example)")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--every", default="30,50", help="H, in steps (default: 30,50)")
    parser.add_argument("--learning-rate", type=float, help="of all trainings, in place of the best one of each")
    parser.add_argument("--rate", type=parse_bandwidth_bits_per_s, help="measure steps on hosts with such links")
    parser.add_argument("-o", "--output", metavar="PICTURE", help="with --rate: the first seed's losses over time")
    parser.add_argument("--runs", help=argparse.SUPPRESS)
    add_worker(parser)
    args = parser.parse_args()
    if args.worker:
        with one_rank():
            write(args.worker, [step_s(run) for run in json.loads(args.runs)])
        return 0
    torch.set_num_threads(1)
    wanted = {name: getattr(args, name) for name in ("ranks", "batch", "width", "steps")}
    kinds = variants([int(each) for each in args.every.split(",")])
    if args.learning_rate is not None:
        kinds = [each | {"rate": args.learning_rate} for each in kinds]
    runs = []
    for seed in range(args.seeds):
        for kind in [each for each in kinds if seed == 0 or each["wire"] == "fp32"]:
            key = wanted | kind | {"seed": seed}
            found = [known for known in read_record(args.record) if key.items() <= known.items()]
            if not found:
                append(args.record, run := train(key))
                print(f"seed {seed}, {name_of(run)}: {run['curve'][-1]:.4f} in {run['seconds']} s", file=sys.stderr)
                found = [run]
            runs.append(found[0])
    show(table(runs), "local-training", args.refresh)
    if args.rate:
        shown = [run for run in runs if run["seed"] == 0 and run["outer"] in (_DDP, "nesterov")]
        steps_s = measured("local_training", args.ranks, args.rate, ["--runs", json.dumps(shown)])
        for run, each_s in zip(shown, steps_s, strict=True):
            print(f"{name_of(run)}: {1e3 * each_s:.1f} ms a step")
        if args.output:
            draw(args.output, shown, steps_s)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main, "local_training"))
