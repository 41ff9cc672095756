"""What a loop's own work costs the overlap: variants of one training loop on hosts with slow links, in turns.

    python -m benchmarks.loops [--hosts 2] [--rate 400mbit] [--rounds 5] [--variants ddp,overlap,...] [--steady]

A timed stand-in of ResNet-50 (root, iproute2). Each variant trains a copy of its own, step by step; the first step of
each turn is trained, but not timed. Another variant is a function that makes a ``Training``, entered in ``VARIANTS``.
"""

import argparse
import logging
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import gradcast
from benchmarks.on_hosts import in_turns, measured, parser_of, spread
from benchmarks.pages import run_program
from gradcast.lab.models import Task, make_task
from gradcast.lab.settings import Settings
from gradcast.lab.standin import GRADIENT_SIZE, Gradients, Layer, SimulatedDevice, StandIn, Wait
from gradcast.lab.trainer import Training, attached, ddp_alone
from gradcast.training.observe import CALIBRATION_STEPS
from gradcast.units import format_bandwidth

_BASE = "overlap"  # with which the others are compared
_LARGE_EVERY, _LARGE_FACTOR = 5, 8  # with max-norm: gradients that are clipped
_OPTIONS: dict[str, Any] = {}  # of all variants, by the command line
_SETTLING_STEPS = gradcast.Planning().warmup_steps + CALIBRATION_STEPS + 4


def _ddp(task: Task, module: nn.Module) -> Training:
    return Training(task, ddp_alone(module), task.optimizer(module))


def _overlap(task: Task, module: nn.Module, **options: Any) -> Training:
    return attached(task, module, **_OPTIONS, **options)


def _average_of(module: nn.Module) -> AveragedModel:
    return AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.999))


def _ema_kept(task: Task, module: nn.Module) -> Training:
    training = _overlap(task, module)
    training.handle.keep_average(_average_of(module))
    return training


def _ema_after_step(task: Task, module: nn.Module) -> Training:
    training, average = _overlap(task, module), _average_of(module)
    training.after_step = lambda: average.update_parameters(module)
    return training


def _clipped_by_loop(task: Task, module: nn.Module) -> Training:
    training = _overlap(task, module)
    training.before_step = lambda: nn.utils.clip_grad_norm_(module.parameters(), 1e9)
    return training


class _SometimesLarge:
    """Gradients that are large in one of five steps, in the same one on all ranks."""

    def __init__(self, gradients: Gradients) -> None:
        self._usual, self._large = gradients, [_LARGE_FACTOR * each for each in gradients.of_step(0)]

    def of_step(self, step: int) -> Sequence[torch.Tensor]:
        return self._large if step % _LARGE_EVERY == 0 else self._usual.of_step(step)


def _max_norm(task: Task, module: nn.Module) -> Training:
    assert isinstance(module, StandIn)
    module.gradients = _SometimesLarge(module.gradients)
    # The ranks' gradients are independent, so the bound of their mean's norm is the norm of one rank's.
    usual_norm = GRADIENT_SIZE * math.sqrt(sum(parameter.numel() for parameter in module.parameters()))
    return _overlap(task, module, clip=gradcast.Clip(norm=1.5 * usual_norm))


class _UnseenLayer(nn.Module):
    """A layer of the stand-in that only gives its weights to an autograd.Function."""

    def __init__(self, device: SimulatedDevice, layer: Layer, weights: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._device, self._layer = device, layer
        for number, weight in enumerate(weights):
            self.register_parameter(f"weight{number}", weight)

    def forward(self, value: torch.Tensor, gradients: tuple[torch.Tensor, ...]) -> torch.Tensor:
        layer, weights = self._layer, self._parameters.values()
        return Wait.apply(self._device, layer.forward_ns, layer.backward_ns, gradients, value, *weights)


class _Unseen(nn.Module):
    """The stand-in made of such layers."""

    def __init__(self, seen: StandIn) -> None:
        super().__init__()
        self._gradients, self._shape, self._device, self._steps = seen.gradients, seen._shape, seen._device, 0
        self.layers = nn.ModuleList(
            _UnseenLayer(seen._device, layer, [seen.weights[index] for index in layer.tensors])
            for layer in seen._shape.layers
        )

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        gradients, shape = self._gradients.of_step(self._steps), self._shape
        self._steps += 1
        value = Wait.apply(self._device, shape.first_forward_ns, shape.last_backward_ns, (), value)
        for layer, of_shape in zip(self.layers, shape.layers, strict=True):
            value = layer(value, gradients[of_shape.tensors.start : of_shape.tensors.stop])
        return value


def _unseen(task: Task, module: nn.Module) -> Training:
    return _overlap(task, _Unseen(module))


def _unseen_before_forward(task: Task, module: nn.Module) -> Training:
    return _overlap(task, _Unseen(module), unseen_reads="before_forward")


VARIANTS: dict[str, Callable[[Task, nn.Module], Training]] = {
    "ddp": _ddp,
    "overlap": _overlap,
    "ema-kept": _ema_kept,
    "ema-after-step": _ema_after_step,
    "clipped-by-loop": _clipped_by_loop,
    "max-norm": _max_norm,
    "unseen": _unseen,
    "unseen-before-forward": _unseen_before_forward,
}


def started(name: str, task: Task) -> Training:
    training = VARIANTS[name](task, task.module())
    training.turn(_SETTLING_STEPS)
    return training


def facts_of(training: Training) -> dict[str, Any]:
    stats = {} if training.handle is None else training.handle.stats()
    share = {"certified_share": (stats.get("clipping") or {}).get("certified_share")}
    return {key: stats.get(key) for key in ("expected_gain", "runs_as_ddp", "waits")} | share


def train(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """One rank."""
    if args.steady:
        _OPTIONS["plan"] = gradcast.Planning(adapt=False)
    profile = gradcast.load_profile(args.model).replace(world_size=args.hosts)
    task = make_task(Settings(profile.name, profile.to_json(), scale_size=args.scale_size), dist.get_rank())
    if dist.get_rank() == 0:
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    trainings = {name: started(name, task) for name in args.variants}
    times_ms: dict[str, list[float]] = {name: [] for name in args.variants}
    for name in in_turns(args.variants, args.rounds):
        times_ms[name] += trainings[name].turn(args.steps)
    facts = {name: {"times_ms": times_ms[name]} | facts_of(training) for name, training in trainings.items()}
    for training in trainings.values():
        training.detach()
    return facts


def table(facts: dict[str, dict[str, Any]]) -> str:
    medians = {name: statistics.median(each["times_ms"]) for name, each in facts.items()}
    rows = []
    for name, each in facts.items():
        gain = each["expected_gain"]
        worst = each["waits"][0] if each["waits"] else None
        rows.append(
            [
                name,
                *spread(each["times_ms"]),
                f"{statistics.mean(each['times_ms']):.1f}",
                f"{medians[_BASE] / medians[name]:.3f}" if _BASE in medians else "",
                "" if gain is None else f"{gain:.2f} x" + (", runs as DDP" if each["runs_as_ddp"] else ""),
                "" if worst is None else f"{worst['what']}: {worst['ms_per_step']:.0f} ms",
                "" if each["certified_share"] is None else f"{each['certified_share']:.0%}",
            ]
        )
    head = [
        "loop",
        "ms per step",
        "80 % of steps",
        "mean ms",
        f"speed, {_BASE} = 1",
        "expected over DDP",
        "waits",
        "certified",
    ]
    return tabulate(rows, headers=head, tablefmt="github", disable_numparse=True)


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in VARIANTS]:
        raise argparse.ArgumentTypeError(f"there is no variant {unknown[0]}; there are {', '.join(VARIANTS)}")
    return names


def main() -> None:
    parser = parser_of(__doc__, rate="400mbit")
    parser.add_argument("--model", default="resnet50", help="profile of the stand-in (default: resnet50)")
    parser.add_argument("--scale-size", type=float, default=0.25, help="of its tensors (default: 0.25)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each variant (default: 5)")
    parser.add_argument("--steps", type=int, default=6, help="per turn (default: 6)")
    parser.add_argument("--variants", type=_names, default=[*VARIANTS], help=f"some of {', '.join(VARIANTS)}")
    parser.add_argument("--steady", action="store_true", help="without tries of the DDP baseline, which count in means")
    args = parser.parse_args()
    facts = measured(train, args.hosts, args.rate, args, promptly=True)
    print(f"{args.model}, {args.hosts} hosts, {format_bandwidth(args.rate)}")
    print(table(facts))


if __name__ == "__main__":
    sys.exit(run_program(main, "loops"))
