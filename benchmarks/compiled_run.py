"""What overlap mode brings to a model that is compiled as a whole, split, or by blocks, beside stock DDP.

    python -m benchmarks.compiled_run [--hosts 2] [--rate 200mbit] [--batch 24] [--width 128] [--rounds 10]

The small GPT of examples/char_gpt.py with SGD, compiled by inductor, on hosts with slow links (root, iproute2, g++):
all copies from the same parameters and on the same texts, in turns of 6 steps. The first step of each turn is not
timed. The last columns compare with DDP around a model that is compiled in the same way (for the split one: whole).
"""

import argparse
import statistics
import sys
import time

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradcast
from benchmarks.on_hosts import in_turns, measured, one_rank, parser_of, spread, write
from benchmarks.pages import run_program
from gradcast.lab.models import Task, make_task
from gradcast.lab.settings import Settings
from gradcast.units import format_bandwidth

_TURN_STEPS = 6
_SETTLING_TURNS = 5  # compiling, warm-up and calibration
# How the model is compiled, and who trains it.
_COPIES = [
    (how, who)
    for how, sides in {"eager": "DDP overlap", "blocks": "DDP overlap", "whole": "DDP overlap split"}.items()
    for who in sides.split()
]


class Copy:
    def __init__(self, task: Task, how: str, who: str) -> None:
        self._task, self.module = task, task.module()
        self._optimizer = task.optimizer(self.module)
        self.times_ms: list[float] = []
        self._steps = 0
        self._handle = None
        self._called: nn.Module = self.module
        if how == "blocks":
            for block in self.module.blocks:
                block.compile()
        elif how == "whole":
            self._called = torch.compile(self.module)
        if who == "DDP":
            self._called = DistributedDataParallel(self._called, process_group=dist.new_group())
        else:
            options = gradcast.Options(split_compiled=who == "split")
            self._handle = gradcast.attach(self._called, self._optimizer, options=options)

    def train(self) -> None:
        dist.barrier()
        times_ms = []
        for inputs, targets in self._task.batches(self._steps, _TURN_STEPS):
            start = time.perf_counter()
            self._optimizer.zero_grad()
            self._task.loss(self._called(inputs), targets).backward()
            self._optimizer.step()
            times_ms.append(1e3 * (time.perf_counter() - start))
        self._steps += _TURN_STEPS
        if self._handle is not None:
            self._handle.flush()
        if self._steps > _SETTLING_TURNS * _TURN_STEPS:
            self.times_ms += times_ms[1:]

    def plan(self) -> str:
        if self._handle is None:
            return "-"
        return "as DDP" if self._handle.stats()["runs_as_ddp"] else f"{len(self._handle.plan.blocks)} blocks"

    def detach(self) -> None:
        if self._handle is not None:
            self._handle.detach()


def worker(args: argparse.Namespace) -> None:
    """One rank."""
    with one_rank() as own:
        task = make_task(Settings("char_gpt", None, (), (), batch=args.batch, width=args.width), own)
        copies = {key: Copy(task, *key) for key in _COPIES}
        for key in in_turns(_COPIES, _SETTLING_TURNS + args.rounds):
            copies[key].train()
        write(args.worker, [row(*key, copies) for key in _COPIES])
        for copy in copies.values():
            copy.detach()


def row(how: str, who: str, copies: dict[tuple[str, str], Copy]) -> list[str]:
    copy, ddp = copies[how, who], copies[how, "DDP"]
    parameters = [torch.cat([p.detach().flatten() for p in each.module.parameters()]) for each in (copy, ddp)]
    apart = (parameters[0] - parameters[1]).abs().max().item()
    gain = statistics.median(ddp.times_ms) / statistics.median(copy.times_ms)
    return [how, who, copy.plan(), *spread(copy.times_ms), f"{gain:.2f} x", f"{apart:.1g}"]


def main() -> int:
    parser = parser_of(__doc__, rate="200mbit")
    parser.add_argument("--batch", type=int, default=24, help="of each rank (default: 24)")
    parser.add_argument("--width", type=int, default=128, help="of the model (default: 128)")
    parser.add_argument("--rounds", type=int, default=10, help="turns of 6 steps that are timed (default: 10)")
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return 0
    rows = measured("compiled_run", args.hosts, args.rate)
    print(f"char_gpt, {args.hosts} hosts, {format_bandwidth(args.rate)}")
    head = ["compiled", "trained by", "plan", "median ms", "80 % of steps", "speed-up", "apart from DDP's"]
    print(tabulate(rows, headers=head, tablefmt="github", disable_numparse=True))
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main, "compiled_run"))
