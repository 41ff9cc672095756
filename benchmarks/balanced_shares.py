"""Balanced shares against even ones on hosts of different speed: how near to the best possible, and how soon.

    python -m benchmarks.balanced_shares [--hosts 4] [--rate 1gbit] [--only half,two,slowed,equal] [--rounds 1]

A timed stand-in of ResNet-50 on hosts with slow links (root, iproute2), whose layers take as long as the samples of
its rank say: stock DDP with even shares, overlap mode with even shares, with the best ones from the first step, and
with gradcast.BalancedBatchSampler. "slowed": rank 3 computes at half speed in the middle third of the steps.
"""

import argparse
import json
import logging
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import gradcast
from benchmarks.pages import run_program
from gradcast.files import load_profile
from gradcast.lab import Network
from gradcast.lab.cores import wake_promptly
from gradcast.lab.models import StandInTask
from gradcast.lab.settings import Settings
from gradcast.lab.workers import run_for_result
from gradcast.shares import best_shares, even_shares
from gradcast.units import parse_bandwidth_bits_per_s

# By rank, in the changed part of the steps.
SCENARIOS = {"half": (1, 1, 1, 2), "two": (1, 1, 2.5, 2.5), "slowed": (1, 1, 1, 2), "equal": (1, 1, 1, 1)}
WAYS = ("ddp", "even", "best", "balanced")
_BATCH = 256
_EVERY, _PREFETCH = 8, 4
_TIMEOUT_S = 600.0
_NEAR = 1.05  # of the best step: arrived


class Fixed:
    """The batch sampler of a rank whose shares stay what they are."""

    def __init__(self, share: int, steps: int) -> None:
        self._share, self._steps = share, steps

    def __iter__(self) -> Any:
        return ([0] * self._share for _ in range(self._steps))


def worker(args: argparse.Namespace) -> None:
    """One rank in one way; rank 0 writes the times of its steps and what was said."""
    torch.set_num_threads(1)
    wake_promptly()
    logging.getLogger("gradcast").setLevel(logging.INFO)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    said = Said()
    logging.getLogger("gradcast").addHandler(said)
    profile = load_profile("resnet50", args.scale).to_json()
    task = StandInTask(Settings("resnet50", profile, (), (), scale_size=args.scale_size), rank)
    module, slowness = task.module(), SCENARIOS[args.scenario]
    optimizer = task.optimizer(module)
    model, handle = module, None
    if args.way == "ddp":
        model = DistributedDataParallel(module)
    else:
        handle = gradcast.attach(module, optimizer, options=gradcast.Options(weight="samples"))
    even = even_shares(_BATCH, world_size)
    shares = best_shares(_BATCH, slowness) if args.way == "best" else even
    sampler: Any = Fixed(shares[rank], args.steps)
    if args.way == "balanced":
        sampler = gradcast.BalancedBatchSampler(range(_BATCH * args.steps), handle, _BATCH, every=_EVERY)
    data = torch.zeros(_BATCH * args.steps)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=1, prefetch_factor=_PREFETCH)
    steps = []
    start = time.perf_counter()
    for number, samples in enumerate(loader):
        said.step = number
        is_slow = args.scenario != "slowed" or args.steps // 3 <= number < 2 * args.steps // 3
        task.device.factor = (slowness[rank] if is_slow else 1) * len(samples) / even[0]
        optimizer.zero_grad()
        # The input requires a gradient so that autograd also runs the first layer's backward.
        model(torch.zeros(len(samples), 1, requires_grad=True)).sum().backward()
        optimizer.step()
        end = time.perf_counter()
        steps.append({"ms": 1e3 * (end - start), "samples": len(samples)})
        start = end
    if rank == 0:
        Path(args.worker).write_text(json.dumps({"steps": steps, "said": said.lines}))
    if handle is not None:
        handle.detach()
    dist.barrier()
    dist.destroy_process_group()


class Said(logging.Handler):
    """What gradcast logs, with the step."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.step, self.lines = 0, []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"step {self.step}: {record.getMessage()}")


def measure(args: argparse.Namespace, scenario: str, way: str, steps: int) -> dict[str, Any]:
    arguments = [f"--scenario={scenario}", f"--way={way}", f"--steps={steps}"]
    arguments += [f"--scale={args.scale:g}", f"--scale-size={args.scale_size:g}", "--worker"]
    with Network(args.hosts, args.rate) as network:
        facts = run_for_result(
            "benchmarks.balanced_shares",
            arguments,
            args.hosts,
            timeout_s=_TIMEOUT_S,
            network=network,
            output=sys.stderr,
        )
    for line in facts["said"]:
        print(f"{scenario}, {way}: {line}", file=sys.stderr)
    return facts


def spread(steps: list[dict[str, Any]]) -> tuple[float, float, float]:
    """Median, and 80 % of the steps, in ms."""
    times_ms = sorted(step["ms"] for step in steps)
    tenth = len(times_ms) // 10
    return statistics.median(times_ms), times_ms[tenth], times_ms[-1 - tenth]


def steady(args: argparse.Namespace, scenario: str) -> list[list[Any]]:
    """A row for each way: the last half of the steps."""
    found = {}
    for way in WAYS:
        if way == "best" and scenario == "equal":
            continue
        facts = measure(args, scenario, way, args.steps)
        found[way] = (*spread(facts["steps"][args.steps // 2 :]), facts["steps"][-1]["samples"])
    best_ms = found.get("best", found["even"])[0]
    return [
        [
            scenario,
            way,
            f"{ms:.1f}",
            f"{low:.1f} to {high:.1f}",
            samples,
            f"{found['ddp'][0] / ms:.2f}",
            f"{best_ms / ms:.3f}",
        ]
        for way, (ms, low, high, samples) in found.items()
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
    count = 3 * args.slowed_steps
    facts = measure(args, "slowed", "balanced", count)
    third, rows = args.slowed_steps, []
    for what, first in (("slowed", third), ("as before", 2 * third)):
        settled_ms, after = arrival(facts["steps"], first, first + third)
        before_ms = statistics.median(step["ms"] for step in facts["steps"][first - 20 : first])
        worst_ms = max(step["ms"] for step in facts["steps"][first : first + third])
        samples = facts["steps"][first + third - 1]["samples"]
        rows.append([what, f"{before_ms:.1f}", f"{worst_ms:.1f}", f"{settled_ms:.1f}", samples, after])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", type=parse_bandwidth_bits_per_s, default=1e9)
    parser.add_argument("--scale", type=float, default=0.4, help="of the stand-in's compute")
    parser.add_argument("--scale-size", type=float, default=0.05, help="of its gradients")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--slowed-steps", type=int, default=100, help="before, in and after the slow part")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SCENARIOS))
    for hidden in ("--scenario", "--way", "--worker"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return 0
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
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main, "balanced_shares"))
