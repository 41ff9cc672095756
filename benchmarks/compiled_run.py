"""What overlap mode brings to a model that is compiled as a whole, split, or by blocks, beside stock DDP.

    python -m benchmarks.compiled_run [--hosts 2] [--rate 200mbit] [--batch 24] [--width 128] [--rounds 10]

The small GPT of examples/char_gpt.py with SGD, compiled by inductor, on hosts with slow links (root, iproute2, g++):
all copies from the same parameters and on the same texts, in turns of 6 steps. The first step of each turn is not
timed. The last columns compare with DDP around a model that is compiled in the same way (for the split one: whole).
"""

import statistics
import sys

import torch
import torch.distributed as dist
from tabulate import tabulate

import gradcast
from benchmarks.on_hosts import in_turns, measured, parser_of, spread
from benchmarks.pages import run_program
from gradcast.lab.models import Task, make_task
from gradcast.lab.settings import Settings
from gradcast.lab.trainer import Training, ddp_alone
from gradcast.units import format_bandwidth

_TURN_STEPS = 6
_SETTLING_TURNS = 5  # compiling, warm-up and calibration
# How the model is compiled, and who trains it.
_COPIES = [
    (how, who)
    for how, sides in {"eager": "DDP overlap", "blocks": "DDP overlap", "whole": "DDP overlap split"}.items()
    for who in sides.split()
]


class Copy(Training):
    def __init__(self, task: Task, how: str, who: str) -> None:
        called = module = task.module()
        optimizer = task.optimizer(module)
        self.times_ms: list[float] = []
        if how == "blocks":
            for block in module.blocks:
                block.compile()
        elif how == "whole":
            called = torch.compile(module)
        if who == "DDP":
            super().__init__(task, ddp_alone(called), optimizer)
        else:
            options = gradcast.Options(split_compiled=who == "split")
            super().__init__(task, called, optimizer, gradcast.attach(called, optimizer, options=options))

    def plan(self) -> str:
        if self.handle is None:
            return "-"
        return "as DDP" if self.handle.stats()["runs_as_ddp"] else f"{len(self.handle.plan.blocks)} blocks"


def train(batch: int, width: int, rounds: int) -> list[list[str]]:
    """One rank."""
    task = make_task(Settings("char_gpt", batch=batch, width=width), dist.get_rank())
    copies = {key: Copy(task, *key) for key in _COPIES}
    for key in in_turns(_COPIES, _SETTLING_TURNS + rounds):
        times_ms = copies[key].turn(_TURN_STEPS)
        if copies[key].step_count > _SETTLING_TURNS * _TURN_STEPS:
            copies[key].times_ms += times_ms
    rows = [row(*key, copies) for key in _COPIES]
    for copy in copies.values():
        copy.detach()
    return rows


def row(how: str, who: str, copies: dict[tuple[str, str], Copy]) -> list[str]:
    copy, ddp = copies[how, who], copies[how, "DDP"]
    parameters = [torch.cat([p.detach().flatten() for p in each.called.parameters()]) for each in (copy, ddp)]
    apart = (parameters[0] - parameters[1]).abs().max().item()
    gain = statistics.median(ddp.times_ms) / statistics.median(copy.times_ms)
    return [how, who, copy.plan(), *spread(copy.times_ms), f"{gain:.2f} x", f"{apart:.1g}"]


def main() -> None:
    parser = parser_of(__doc__, rate="200mbit")
    parser.add_argument("--batch", type=int, default=24, help="of each rank (default: 24)")
    parser.add_argument("--width", type=int, default=128, help="of the model (default: 128)")
    parser.add_argument("--rounds", type=int, default=10, help="turns of 6 steps that are timed (default: 10)")
    args = parser.parse_args()
    rows = measured(train, args.hosts, args.rate, args.batch, args.width, args.rounds)
    print(f"char_gpt, {args.hosts} hosts, {format_bandwidth(args.rate)}")
    head = ["compiled", "trained by", "plan", "median ms", "80 % of steps", "speed-up", "apart from DDP's"]
    print(tabulate(rows, headers=head, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    sys.exit(run_program(main, "compiled_run"))
