"""How often clipping at 1.0 costs the overlap while a model trains from scratch, and what a step takes against DDP's.

    python -m benchmarks.clipping_run [--hosts 2] [--rate 200mbit] [--rounds 40] [-o docs/images/clipping.png]

The small GPT of examples/char_gpt.py with AdamW on hosts with slow links (root, iproute2): one copy under DDP with
``clip_grad_norm_``, one in overlap mode with ``Options(clip=Clip(norm=1.0))``, from the same parameters and on the same
texts, in turns of 8 steps. The first step of each turn is trained, but not timed. What is logged goes to standard
error.
"""

import logging
import math
import statistics
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradcast
from benchmarks.on_hosts import in_turns, measured, parser_of
from benchmarks.pages import run_program
from gradcast.lab.models import Task, make_task
from gradcast.lab.settings import Settings
from gradcast.lab.trainer import Training, ddp_alone
from gradcast.palette import CHANGED, CURVES
from gradcast.units import format_bandwidth

_MAX_NORM = 1.0
_TURN_STEPS = 8
_WINDOW_STEPS = 64  # over which stats() counts certified steps


class Copy(Training):
    """The model as it is trained with DDP or with gradcast."""

    def __init__(self, task: Task, *, ddp: bool) -> None:
        module = task.module()
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        if ddp:
            super().__init__(task, ddp_alone(module), optimizer)
            self.before_step = lambda: nn.utils.clip_grad_norm_(module.parameters(), _MAX_NORM)
        else:
            options = gradcast.Options(clip=gradcast.Clip(norm=_MAX_NORM))
            super().__init__(task, module, optimizer, gradcast.attach(module, optimizer, options=options))
        self.times_ms: list[list[float]] = []  # by turn
        # After each turn: the share of the last steps that were certified, and whether the steps follow DDP's plan.
        self.shares: list[float | None] = []
        self.plans: list[str] = []

    def make_turn(self) -> None:
        self.times_ms.append(self.turn(_TURN_STEPS))
        if self.handle is not None:
            stats = self.handle.stats()
            self.shares.append((stats["clipping"] or {}).get("certified_share"))
            self.plans.append("DDP's" if stats["runs_as_ddp"] else f"{self.handle.plan.mode} mode's")

    def facts(self) -> dict[str, Any]:
        losses = [loss.item() for loss in self.losses]
        return {"losses": losses, "times_ms": self.times_ms, "shares": self.shares, "plans": self.plans}


def train(batch: int, rounds: int) -> dict[str, dict[str, Any]]:
    """One rank."""
    if dist.get_rank() == 0:
        logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
    task = make_task(Settings("char_gpt", batch=batch), dist.get_rank())
    copies = {name: Copy(task, ddp=name == "ddp") for name in ("ddp", "overlap")}
    for name in in_turns([*copies], rounds):
        copies[name].make_turn()
    for copy in copies.values():
        copy.detach()
    return {name: copy.facts() for name, copy in copies.items()}


def report(facts: dict[str, dict[str, Any]]) -> list[str]:
    """A line for each window of steps, and one for the whole run."""
    turns = _WINDOW_STEPS // _TURN_STEPS
    ddp, overlap = facts["ddp"], facts["overlap"]
    lines = []
    for end in range(turns, len(overlap["shares"]) + 1, turns):
        medians = [
            statistics.median(time_ms for times in each["times_ms"][end - turns : end] for time_ms in times)
            for each in (ddp, overlap)
        ]
        share = overlap["shares"][end - 1]
        certified = (
            "none decided" if share is None or overlap["plans"][end - 1] == "DDP's" else f"{share:.0%} certified"
        )
        loss = overlap["losses"][end * _TURN_STEPS - 1]
        lines.append(
            f"to step {end * _TURN_STEPS}: {certified}, {overlap['plans'][end - 1]} plan, {medians[0]:.1f} ms per step "
            f"with DDP, {medians[1]:.1f} with gradcast, {medians[0] / medians[1]:.2f} x, loss {loss:.3f}"
        )
    apart = max(abs(a - b) for a, b in zip(ddp["losses"], overlap["losses"], strict=True))
    return [*lines, f"largest difference of the losses: {apart:.2g}"]


def draw(path: str, facts: dict[str, dict[str, Any]]) -> None:
    from gradcast.plots.canvas import draw_grid, plt, save

    figure, (above, below) = plt.subplots(2, figsize=(6.2, 3.6), sharex=True, layout="constrained")
    overlap = facts["overlap"]
    steps = [_TURN_STEPS * (number + 1) for number in range(len(overlap["plans"]))]
    percent = [
        math.nan if share is None or plan == "DDP's" else 100 * share
        for share, plan in zip(overlap["shares"], overlap["plans"], strict=True)
    ]
    above.plot(steps, percent, color=CURVES[0])
    above.set_ylim(0, 103)
    above.set_ylabel(f"% certified\nof the last {_WINDOW_STEPS} steps")
    for color, label, name in ((CURVES[1], "DDP", "ddp"), (CURVES[0], "gradcast", "overlap")):
        medians = [statistics.median(times) for times in facts[name]["times_ms"]]
        below.plot(steps, medians, color=color, label=label)
    below.set_ylim(bottom=0)
    below.set_ylabel("ms per step")
    below.set_xlabel("step")
    for axes in (above, below):
        draw_grid(axes)
        labels = iter(["gradcast runs as DDP"])
        for step, plan in zip(steps, overlap["plans"], strict=True):
            if plan == "DDP's":
                axes.axvspan(step - _TURN_STEPS, step, color=CHANGED, linewidth=0, label=next(labels, None))
    below.legend(frameon=False, loc="lower right", ncols=3)
    save(figure, path)


def main() -> None:
    parser = parser_of(__doc__, rate="200mbit")
    parser.add_argument("--batch", type=int, default=24, help="of each rank (default: 24)")
    parser.add_argument("--rounds", type=int, default=40, help="turns of 8 steps of each copy (default: 40)")
    parser.add_argument("-o", "--output", metavar="PICTURE", help="draw it")
    args = parser.parse_args()
    facts = measured(train, args.hosts, args.rate, args.batch, args.rounds)
    print(f"char_gpt, {args.hosts} hosts, {format_bandwidth(args.rate)}")
    print("\n".join(report(facts)))
    if args.output:
        draw(args.output, facts)


if __name__ == "__main__":
    sys.exit(run_program(main, "clipping_run"))
