"""What local steps change in what a model learns: char_gpt trained as DDP trains it, and with local steps once DDP has
trained a share of the steps (post-local SGD, arXiv 1808.07217), from the same parameters and on the same texts.

    python -m benchmarks.local_training [--steps 3000] [--batch 2] [--seeds 5] [--every 30,50] [--start 0.3]
    python -m benchmarks.local_training --device cuda --wires fp32
    python -m benchmarks.local_training --rate 50mbit -o picture.png    # root, iproute2

Runs that the record holds are not repeated. One process trains the models of all ranks. In fp32 those of a seed are one
stack of tensors (benchmarks/stacked_gpt.py), which has the numbers of gradcast's reference within rounding. With int8,
which is for the first seed, one model is trained after the other, with the references whose bits gradcast has on two
ranks (tests/training/local/test_rounds.py, tests/training/step/test_wire.py). Every rank draws the same number of texts
in each variant, so losses are compared at equal tokens; one rank alone has its own texts only. The last tenth of the
text is held out; with local steps the global copy is measured, at the end after ``handle.end_round()``. In the
record ``seconds`` are those of all runs that were trained together, and ``python`` is whose library was the text.

With ``--rate`` hosts with links of that rate make some steps of each variant, and the picture shows the loss over the
time that the steps take there.
"""

import copy
import dataclasses
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn

import gradcast
from benchmarks.int8_training import chances, char_gpt, held_out_measure, loss_of
from benchmarks.on_hosts import measured
from benchmarks.pages import append, find_run, parser_of, read_record, run_program, show
from benchmarks.stacked_gpt import MOMENTUM, Stack, first_local_step, rates
from gradcast.cli.common import BANDWIDTH
from gradcast.lab.models import make_task
from gradcast.lab.settings import Settings
from gradcast.lab.trainer import Training
from gradcast.palette import CURVES
from gradcast.training.local import outer

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from training.int8_mean import Int8Mean
from training.local.reference import Narrow, averaged

_DDP, _ALONE = "DDP", "one rank alone"
_SETTINGS: dict[str, dict[str, Any]] = {  # rate: of SGD
    _DDP: {"rate": 0.4},
    _ALONE: {"rate": 0.4},
    "average": {"rate": 0.4},
    "nesterov": {"rate": 0.2, "outer_lr": outer.LR, "outer_momentum": outer.MOMENTUM},
}
_SHOWN = "nesterov"  # which outer optimizer is trained with int8 too, and drawn
_MEASURED_EVERY = 250  # steps
_WARMUP_STEPS = 24
_TIMED_STEPS, _TIMED_STEPS_MIN, _TIMED_S = 20, 5, 20.0  # whole rounds, at most so long unless they are longer


def train_int8(run: dict[str, Any], device: str) -> list[float]:
    """The held-out losses of one training with int8: DDP's, then that with local steps if the run has any."""
    torch.manual_seed(run["seed"])
    job = char_gpt(run["batch"], run["width"])
    module = job.module().to(device)
    parameters, own_chances = list(module.parameters()), chances(run["seed"], run["ranks"])
    job = dataclasses.replace(job, held_out=tuple(each.to(device) for each in job.held_out))
    optimizers = [torch.optim.SGD(parameters, lr=run["rate"], momentum=MOMENTUM)]
    int8, local, curve = Int8Mean(parameters, run["ranks"]), None, []

    def same_optimizer(module: nn.Module) -> torch.optim.Optimizer:
        own = torch.optim.SGD(module.parameters(), lr=run["rate"], momentum=MOMENTUM)
        own.load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        return own

    def global_model() -> nn.Module:
        if local is not None:
            for each, value in zip(averaged(module)[0], local.values, strict=True):
                each.copy_(value)
        return module

    for number, rate in enumerate(rates(run["rate"], run["steps"])):
        if number == first_local_step(run):
            local = Narrow(module, same_optimizer, *(run[name] for name in ("ranks", "every", "overlap", "outer")))
            local.use("int8", dict.fromkeys(range(len(local.parts)), 0))
            optimizers = local.optimizers
        if number % _MEASURED_EVERY == 0:
            curve.append(held_out_measure(job, global_model()))
        batches = [[each.to(device) for each in job.draw(chance)] for chance in own_chances]
        if local is None:
            own = [torch.autograd.grad(loss_of(module, *each), parameters) for each in batches]
            for index, (parameter, *gradients) in enumerate(zip(parameters, *own, strict=True)):
                parameter.grad = int8.of(index, gradients)
        else:
            for each, batch in zip(local.modules, batches, strict=True):
                each.zero_grad()
                loss_of(each, *batch).backward()
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
        if local is not None:
            local.after_step()
    if local is not None:
        local.end()
    return [*curve, held_out_measure(job, global_model())]


def train(keys: list[dict[str, Any]], device: str) -> list[dict[str, Any]]:
    """Runs that are trained together: those with int8 one by one, the others as a stack."""
    start = time.perf_counter()
    if keys[0]["wire"] == "int8":
        curves = [train_int8(key, device) for key in keys]
    else:
        stack = Stack(keys, 1 if keys[0]["outer"] == _ALONE else keys[0]["ranks"], device)
        keys, curves = stack.runs, stack.train(_MEASURED_EVERY)
    facts = {"device": device, "python": platform.python_version(), "seconds": round(time.perf_counter() - start)}
    rounded = [[round(each, 5) for each in curve] for curve in curves]
    return [key | {"curve": curve} | facts for key, curve in zip(keys, rounded, strict=True)]


def trained_with(key: dict[str, Any]) -> tuple[Any, ...]:
    """Runs for which this is the same are trained together."""
    if key["wire"] == "int8":
        return ("int8", key["outer"])
    return (_ALONE,) if key["outer"] == _ALONE else ("seed", key["seed"])


def name_of(run: dict[str, Any]) -> str:
    local = f"{run['outer']}, H = {run['every']}{', blocking' if run['overlap'] == 0 else ''}"
    name = run["outer"] if run["outer"] in (_DDP, _ALONE) else local
    return f"{name}, int8" if run["wire"] == "int8" else name


def table(runs: list[dict[str, Any]]) -> str:
    """Differences are paired by seed."""
    plain = {run["seed"]: run["curve"][-1] for run in runs if name_of(run) == _DDP}
    rows = []
    for name in dict.fromkeys(name_of(run) for run in runs if run["seed"] in plain):
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


def variants(every: list[int], start: float, overlap: int | None) -> list[dict[str, Any]]:
    def variant(outer: str, **settings: Any) -> dict[str, Any]:
        return {"every": 1, "outer": outer, "overlap": None, "wire": "fp32"} | settings | _SETTINGS[outer]

    local = {"start": start, "overlap": overlap}
    found = [variant(_DDP), variant(_ALONE), variant(_DDP, wire="int8")]
    found += [variant(outer, every=each, **local) for each in every for outer in ("average", "nesterov")]
    return [*found, variant(_SHOWN, every=every[-1], wire="int8", **local)]


# --- How long its steps take on hosts with slow links ---


def attached(run: dict[str, Any], module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
    """What the program calls, and the handle, None for stock DDP."""
    if run["outer"] == _DDP and run["wire"] == "fp32":
        return nn.parallel.DistributedDataParallel(module), None
    local = None
    if run["outer"] != _DDP:
        lr, momentum = run.get("outer_lr"), run.get("outer_momentum")
        local = gradcast.LocalSteps(run["every"], outer=run["outer"], lr=lr, momentum=momentum, overlap=run["overlap"])
    return module, gradcast.attach(module, optimizer, options=gradcast.Options(wire=run["wire"], local=local))


def step_s(run: dict[str, Any]) -> float:
    """How long a step of this rank takes: the mean over whole rounds, all updates included."""
    task = make_task(Settings("char_gpt", width=run["width"], batch=run["batch"]), dist.get_rank())
    module = task.module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    called, handle = attached(run, module, optimizer)
    training = Training(task, called, optimizer, handle)
    warmup_count = max(run["every"], 2 if handle is None else _WARMUP_STEPS)
    warm_s = torch.tensor(training.duration_s(warmup_count) / warmup_count)
    dist.broadcast(warm_s, 0)  # all ranks make the same number of steps
    count = max(_TIMED_STEPS_MIN, min(_TIMED_STEPS, int(_TIMED_S / float(warm_s))))
    count = run["every"] * -(-count // run["every"])
    found = training.duration_s(count) / count
    training.detach()
    return found


def step_all_s(runs: list[dict[str, Any]]) -> list[float]:
    """One rank."""
    return [step_s(run) for run in runs]


def spent_min(runs: list[dict[str, Any]], steps_s: list[float]) -> list[list[float]]:
    """The minutes at each loss of the curves. Until local steps begin, a step takes as long as DDP's of that wire."""
    synced_s = {run["wire"]: each_s for run, each_s in zip(runs, steps_s, strict=True) if run["outer"] == _DDP}
    found = []
    for run, each_s in zip(runs, steps_s, strict=True):
        begin, steps = first_local_step(run), [*range(0, run["steps"], _MEASURED_EVERY), run["steps"]]
        spent_s = (min(step, begin) * synced_s[run["wire"]] + max(0, step - begin) * each_s for step in steps)
        found.append([each / 60 for each in spent_s])
    return found


def draw(path: str, runs: list[dict[str, Any]], steps_s: list[float]) -> None:
    """The held-out loss over the time of the steps."""
    from gradcast.plots.canvas import draw_grid, plt, save

    figure, axes = plt.subplots(figsize=(6.2, 3.4), layout="constrained")
    for run, each_s, minutes, color in zip(runs, steps_s, spent_min(runs, steps_s), CURVES, strict=False):
        label = f"{name_of(run)}: {1e3 * each_s:.0f} ms a step"
        axes.plot(minutes, run["curve"], color=color, label=label, marker=".")
    axes.set_ylim(top=max(run["curve"][1] for run in runs) + 0.1)  # without the untrained models
    axes.set_xlim(left=0)
    axes.set_xlabel("minutes")
    axes.set_ylabel("held-out loss")
    axes.legend(frameon=False)
    draw_grid(axes)
    save(figure, path)


def main() -> None:
    parser = parser_of(__doc__, "local_training.jsonl")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2, help="texts of each rank and step (default: 2)")
    parser.add_argument("--width", type=int, default=128, help="of the model (default: 128, as in the example)")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--every", default="30,50", help="H, in steps (default: 30,50)")
    parser.add_argument("--start", type=float, default=0.3, help="share of steps that are DDP's first (default: 0.3)")
    parser.add_argument("--overlap", type=int, help="0: blocking; default: streamed, as gradcast's default")
    parser.add_argument("--wires", default="fp32,int8", help="which variants are trained (default: fp32,int8)")
    parser.add_argument("--outers", default=",".join(_SETTINGS), help="and which of these (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu (the default) or cuda")
    parser.add_argument("--learning-rate", type=float, help="of all trainings, in place of the best one of each")
    parser.add_argument("--rate", type=BANDWIDTH, help="measure steps on hosts with such links")
    parser.add_argument("-o", "--output", metavar="PICTURE", help="with --rate: the first seed's losses over time")
    args = parser.parse_args()
    torch.set_num_threads(1)
    wanted = {name: getattr(args, name) for name in ("ranks", "batch", "width", "steps")}
    kinds = variants([int(each) for each in args.every.split(",")], args.start, args.overlap)
    wires, outers = args.wires.split(","), args.outers.split(",")
    if args.rate and _DDP not in outers:
        parser.error(f"--rate compares with DDP: --outers has to name {_DDP}")
    kinds = [each for each in kinds if each["wire"] in wires and each["outer"] in outers]
    if args.learning_rate is not None:
        kinds = [each | {"rate": args.learning_rate} for each in kinds]
    keys = [
        wanted | kind | {"seed": seed}
        for seed in range(args.seeds)
        for kind in kinds
        if seed == 0 or kind["wire"] == "fp32"
    ]
    record = read_record(args.record)
    missing: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for key in keys:
        if find_run(record, key) is None:
            missing.setdefault(trained_with(key), []).append(key)
    for together in missing.values():
        for run in train(together, args.device):
            append(args.record, run)
            print(f"seed {run['seed']}, {name_of(run)}: {run['curve'][-1]:.4f}, {run['seconds']} s", file=sys.stderr)
    record = read_record(args.record)
    runs = [find_run(record, key) for key in keys]
    show(table(runs), "local-training", args.refresh)
    if args.rate:
        last = max(run["every"] for run in runs)
        shown = [
            run for run in runs if run["seed"] == 0 and (run["outer"], run["every"]) in ((_DDP, 1), (_SHOWN, last))
        ]
        steps_s = measured(step_all_s, args.ranks, args.rate, shown)
        for run, each_s, minutes in zip(shown, steps_s, spent_min(shown, steps_s), strict=True):
            print(f"{name_of(run)}: {1e3 * each_s:.1f} ms a step, {minutes[-1]:.1f} min to {run['curve'][-1]:.3f}")
        if args.output:
            draw(args.output, shown, steps_s)


if __name__ == "__main__":
    sys.exit(run_program(main, "local_training"))
