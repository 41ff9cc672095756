"""What a wire format saves and what it costs: step times and losses of one model that is trained with each of them.

    python -m benchmarks.wire_formats [--hosts 2] [--rate 100mbit] [--rounds 60] [-o losses.png]

The small GPT of examples/char_gpt.py, with SGD, in overlap mode on hosts with slow links (root, iproute2). One copy
per wire format, from the same parameters and on the same texts, the copies in turns, so that whatever else the machine
does falls on all of them. The first step of each turn is trained, but not timed.
"""

import statistics
import sys
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate

import gradcast
from benchmarks.on_hosts import in_turns, measured, parser_of, spread
from benchmarks.pages import run_program
from gradcast import _core
from gradcast.host_traffic import WIRE_SHARES
from gradcast.lab.models import Task, make_task
from gradcast.lab.settings import Settings
from gradcast.lab.trainer import Training
from gradcast.palette import CURVES
from gradcast.units import format_bandwidth

_LEARNING_RATE = 0.2  # with which this model learns most in some hundred steps
_MEAN_STEPS = 20  # losses of single batches jump
_COLOURS = dict(zip(WIRE_SHARES, CURVES, strict=False))


class Copy(Training):
    """The model as it is trained with one wire format."""

    def __init__(self, wire: str, task: Task) -> None:
        self.times_ms: list[float] = []
        module = task.module()
        optimizer = torch.optim.SGD(module.parameters(), lr=_LEARNING_RATE, momentum=0.9)
        # The plan that the warm-up leads to, to the end: a try of another one would be a step of another kind.
        options = gradcast.Options(wire=wire, plan=gradcast.Planning(adapt=False))
        super().__init__(task, module, optimizer, gradcast.attach(module, optimizer, options=options))

    def facts(self) -> dict[str, Any]:
        losses = torch.stack(self.losses)
        dist.all_reduce(losses)
        stats = self.handle.stats()
        return {
            "losses": (losses / dist.get_world_size()).tolist(),
            "times_ms": self.times_ms,
            **{name: stats[name] for name in ("bytes", "wire_bytes", "compute_ms", "blocks")},
        }


def train(rounds: int, steps: int) -> dict[str, dict[str, Any]]:
    """One rank."""
    task = make_task(Settings("char_gpt"), dist.get_rank())
    copies = {wire: Copy(wire, task) for wire in WIRE_SHARES}
    for wire in in_turns([*WIRE_SHARES], rounds):
        copy = copies[wire]
        times_ms = copy.turn(steps)
        counted = copy.step_count - gradcast.Planning().warmup_steps - 1
        copy.times_ms += times_ms[-counted:] if counted > 0 else []
        if dist.get_rank() == 0:
            print(f"{wire}, step {copy.step_count}: loss {copy.losses[-1]:.3f}", flush=True)
    plain = copies["fp32"]
    return {wire: copy.facts() | {"predicted_ms": predicted_ms(wire, plain)} for wire, copy in copies.items()}


def predicted_ms(wire: str, plain: Copy) -> float:
    """What ``gradcast simulate --wire`` says, from the profile that was measured without one."""
    profile = plain.handle.profile
    share = WIRE_SHARES[wire]
    return _core.make_plan(profile, profile.link.scaled(1, share), mode="overlap").predicted_ns / 1e6


def running_means(losses: list[float]) -> list[float]:
    return [statistics.mean(losses[end - _MEAN_STEPS : end]) for end in range(_MEAN_STEPS, len(losses) + 1)]


def table(facts: dict[str, dict[str, Any]]) -> str:
    head = [
        "wire", "MB per step", "ms per step", "80 % of steps", "predicted ms", "speed-up", "loss at the end",
        "largest difference",
    ]  # fmt: skip
    plain = facts["fp32"]
    plain_means = running_means(plain["losses"])
    rows = []
    for wire, each in facts.items():
        step_ms, means = statistics.median(each["times_ms"]), running_means(each["losses"])
        difference = max(abs(a - b) / b for a, b in zip(means, plain_means, strict=True))
        rows.append(
            [
                wire,
                f"{each['wire_bytes'] / 1e6:.2f}",
                *spread(each["times_ms"]),
                f"{each['predicted_ms']:.1f}",
                f"{statistics.median(plain['times_ms']) / step_ms:.2f} x",
                f"{means[-1]:.4f}",
                f"{difference:.2%}",
            ]
        )
    return tabulate(rows, headers=head, tablefmt="github", disable_numparse=True)


def draw(path: str, facts: dict[str, Any]) -> None:
    """Above the losses, below how far they are from those of fp32: the curves alone lie on one another."""
    from gradcast.plots.canvas import draw_grid, plt, save

    figure, (above, below) = plt.subplots(2, figsize=(8, 5.4), sharex=True, height_ratios=(2, 1), layout="constrained")
    plain = running_means(facts["fp32"]["losses"])
    steps = range(_MEAN_STEPS, _MEAN_STEPS + len(plain))
    for wire, each in facts.items():
        means = running_means(each["losses"])
        above.plot(steps, means, color=_COLOURS[wire], linewidth=2.4 if wire == "fp32" else 1.2, label=wire)
        differences = [100 * (mean / other - 1) for mean, other in zip(means, plain, strict=True)]
        below.plot(steps, differences, color=_COLOURS[wire], linewidth=1.2)
    above.set_ylabel(f"loss, mean of {_MEAN_STEPS} steps")
    below.set_ylabel("from fp32, %")
    below.set_xlabel("step")
    for axes in (above, below):
        draw_grid(axes)
    above.legend(frameon=False)
    save(figure, path)


def main() -> None:
    parser = parser_of(__doc__, rate="100mbit")
    parser.add_argument("--rounds", type=int, default=60, help="turns of each wire format (default: 60)")
    parser.add_argument("--steps", type=int, default=5, help="per turn (default: 5)")
    parser.add_argument("-o", "--output", metavar="PICTURE", help="draw the losses")
    args = parser.parse_args()
    if args.rounds * args.steps < _MEAN_STEPS:
        parser.error(f"--rounds times --steps has to be at least {_MEAN_STEPS}")
    facts = measured(train, args.hosts, args.rate, args.rounds, args.steps)
    print(f"{args.hosts} hosts, {format_bandwidth(args.rate)}, {len(facts['fp32']['losses'])} steps of each")
    print(table(facts))
    if args.output:
        draw(args.output, facts)


if __name__ == "__main__":
    sys.exit(run_program(main, "wire_formats"))
