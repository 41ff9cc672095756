"""Balanced shares against even ones on hosts of different speed: how near to the best possible, and how soon.

    python -m benchmarks.balanced_shares [--hosts 4] [--rate 1gbit] [--only half,two,slowed,equal] [--rounds 1]

A timed stand-in of ResNet-50 on hosts with slow links (root, iproute2), whose layers take as long as the samples of
its rank say: stock DDP with even shares, overlap mode with even shares, with the best ones from the first step, and
with gradcast.BalancedBatchSampler. "slowed": rank 3 computes at half speed in the middle third of the steps.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import gradcast
from benchmarks.on_hosts import measured, parser_of, spread
from benchmarks.pages import run_program
from gradcast.files import load_profile
from gradcast.lab.adapt_worker import recorded_log
from gradcast.lab.models import Batch, StandInTask
from gradcast.lab.settings import Settings
from gradcast.lab.trainer import Training
from gradcast.shares import best_shares, even_shares

# By rank, in the changed part of the steps.
SCENARIOS = {"half": (1, 1, 1, 2), "two": (1, 1, 2.5, 2.5), "slowed": (1, 1, 1, 2), "equal": (1, 1, 1, 1)}
WAYS = ("ddp", "even", "best", "balanced")
_BATCH = 256
_EVERY, _PREFETCH = 8, 4
_NEAR = 1.05  # of the best step: arrived


class Fixed:
    """The batch sampler of a rank whose shares stay what they are."""

    def __init__(self, share: int, steps: int) -> None:
        self._share, self._steps = share, steps

    def __iter__(self) -> Any:
        return ([0] * self._share for _ in range(self._steps))


def train(args: argparse.Namespace, scenario: str, way: str, step_count: int) -> list[dict[str, Any]]:
    """One rank in one way: its steps. Prints what gradcast logs."""
    recorder, rank = recorded_log(), dist.get_rank()
    profile = load_profile("resnet50", args.scale).to_json()
    task = StandInTask(Settings("resnet50", profile, scale_size=args.scale_size), rank)
    module, slowness = task.module(), SCENARIOS[scenario]
    optimizer = task.optimizer(module)
    model, handle = module, None
    if way == "ddp":
        model = DistributedDataParallel(module)
    else:
        handle = gradcast.attach(module, optimizer, options=gradcast.Options(weight="samples"))
    even = even_shares(_BATCH, dist.get_world_size())
    shares = best_shares(_BATCH, slowness) if way == "best" else even
    sampler: Any = Fixed(shares[rank], step_count)
    if way == "balanced":
        sampler = gradcast.BalancedBatchSampler(range(_BATCH * step_count), handle, _BATCH, every=_EVERY)
    data = torch.zeros(_BATCH * step_count)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=1, prefetch_factor=_PREFETCH)
    sizes: list[int] = []

    def batches() -> Iterator[Batch]:
        for number, samples in enumerate(loader):
            recorder.step = number
            is_slow = scenario != "slowed" or step_count // 3 <= number < 2 * step_count // 3
            task.device.factor = (slowness[rank] if is_slow else 1) * len(samples) / even[0]
            sizes.append(len(samples))
            # The input requires a gradient so that autograd also runs the first layer's backward.
            yield torch.zeros(len(samples), 1, requires_grad=True), samples

    training = Training(task, model, optimizer, handle)
    steps = [{"ms": ms, "samples": sizes[-1]} for ms in training.steps(batches())]
    training.detach()
    return steps


def measure(args: argparse.Namespace, scenario: str, way: str, steps: int) -> list[dict[str, Any]]:
    print(f"{scenario}, {way}:", file=sys.stderr)
    return measured(train, args.hosts, args.rate, args, scenario, way, steps, promptly=True)


def steady(args: argparse.Namespace, scenario: str) -> list[list[Any]]:
    """A row for each way: the last half of the steps."""
    found = {}
    for way in WAYS:
        if way == "best" and scenario == "equal":
            continue
        found[way] = measure(args, scenario, way, args.steps)[args.steps // 2 :]
    times_ms = {way: [step["ms"] for step in steps] for way, steps in found.items()}
    medians_ms = {way: statistics.median(times) for way, times in times_ms.items()}
    best_ms = medians_ms.get("best", medians_ms["even"])
    return [
        [
            scenario,
            way,
            *spread(times_ms[way]),
            found[way][-1]["samples"],
            f"{medians_ms['ddp'] / ms:.2f}",
            f"{best_ms / ms:.3f}",
        ]
        for way, ms in medians_ms.items()
    ]


def arrival(steps: list[dict[str, Any]], first: int, last: int) -> tuple[float, int | None]:
    """The settled step between two changes, in ms, and after how many steps nine of the next ten are near it."""
    settled_ms = statistics.median(step["ms"] for step in steps[(first + last) // 2 : last])
    for begin in range(first, last - 10):
        near = [step["ms"] <= _NEAR * settled_ms for step in steps[begin : begin + 10]]
        if near[0] and sum(near) >= 9:
            return settled_ms, begin - first
    return settled_ms, None


def slowed(args: argparse.Namespace) -> list[list[Any]]:
    third, rows = args.slowed_steps, []
    steps = measure(args, "slowed", "balanced", 3 * third)
    for what, first in (("slowed", third), ("as before", 2 * third)):
        settled_ms, after = arrival(steps, first, first + third)
        before_ms = statistics.median(step["ms"] for step in steps[first - 20 : first])
        worst_ms = max(step["ms"] for step in steps[first : first + third])
        samples = steps[first + third - 1]["samples"]
        rows.append([what, f"{before_ms:.1f}", f"{worst_ms:.1f}", f"{settled_ms:.1f}", samples, after])
    return rows


def main() -> None:
    parser = parser_of(__doc__, rate="1gbit", hosts=4)
    parser.add_argument("--scale", type=float, default=0.4, help="of the stand-in's compute")
    parser.add_argument("--scale-size", type=float, default=0.05, help="of its gradients")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--slowed-steps", type=int, default=100, help="before, in and after the slow part")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SCENARIOS))
    args = parser.parse_args()
    for _ in range(args.rounds):
        rows = [row for name in args.only if name != "slowed" for row in steady(args, name)]
        headers = ["scenario", "shares", "ms", "80 % of steps", "samples of rank 0", "speed, DDP = 1", "of the best"]
        print(tabulate(rows, headers, disable_numparse=True))
        if "slowed" in args.only:
            headers = [
                "rank 3",
                "before, ms",
                "longest, ms",
                "settled, ms",
                "samples of rank 0",
                "within 5 % after steps",
            ]
            print(f"every={_EVERY}, {_PREFETCH} batches prefetched")
            print(tabulate(slowed(args), headers, disable_numparse=True))


if __name__ == "__main__":
    sys.exit(run_program(main, "balanced_shares"))
