"""What a wire format saves and what it costs: step times and losses of one model that is trained with each of them.

    python -m benchmarks.wire_formats [--hosts 2] [--rate 100mbit] [--rounds 60] [-o losses.png]

The small GPT of examples/char_gpt.py, with SGD, in overlap mode on hosts with slow links (root, iproute2). One copy
per wire format, from the same parameters and on the same texts, the copies in turns, so that whatever else the machine
does falls on all of them. The first step of each turn is trained, but not timed.
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

import gradcast
from benchmarks.pages import run_program
from gradcast import _core
from gradcast.host_traffic import WIRE_SHARES
from gradcast.lab import Network
from gradcast.lab.models import Task, make_task
from gradcast.lab.settings import Settings
from gradcast.lab.workers import run_for_result
from gradcast.palette import CURVES
from gradcast.units import format_bandwidth, parse_bandwidth_bits_per_s

_LEARNING_RATE = 0.2  # with which this model learns most in some hundred steps
_MEAN_STEPS = 20  # losses of single batches jump
_TIMEOUT_S = 3600.0
_COLOURS = dict(zip(WIRE_SHARES, CURVES, strict=False))


class Copy:
    """The model as it is trained with one wire format."""

    def __init__(self, wire: str, task: Task) -> None:
        self.losses: list[float] = []
        self.times_ms: list[float] = []
        self._task, self._module = task, task.module()
        self._optimizer = torch.optim.SGD(self._module.parameters(), lr=_LEARNING_RATE, momentum=0.9)
        # The plan that the warm-up leads to, to the end: a try of another one would be a step of another kind.
        options = gradcast.Options(wire=wire, adapt=False)
        self.handle = gradcast.attach(self._module, self._optimizer, options=options)

    def train(self, steps: int) -> None:
        batches = self._task.batches(len(self.losses), steps)
        dist.barrier()
        for number, (inputs, targets) in enumerate(batches):
            start = time.perf_counter()
            self._optimizer.zero_grad()
            loss = self._task.loss(self._module(inputs), targets)
            loss.backward()
            self._optimizer.step()
            # The first one of a turn finds caches and TCP's windows as another copy has left them.
            if number > 0 and len(self.losses) > gradcast.Options().warmup_steps:
                self.times_ms.append(1e3 * (time.perf_counter() - start))
            self.losses.append(loss.item())
        self.handle.flush()

    def facts(self) -> dict[str, Any]:
        losses = torch.tensor(self.losses)
        dist.all_reduce(losses)
        stats = self.handle.stats()
        return {
            "losses": (losses / dist.get_world_size()).tolist(),
            "times_ms": self.times_ms,
            **{name: stats[name] for name in ("bytes", "wire_bytes", "compute_ms", "blocks")},
        }


def worker(rounds: int, steps: int, results_path: str) -> None:
    """One rank; rank 0 writes what it measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    task = make_task(Settings("char_gpt", None, rates_bits_per_s=(), names=()), dist.get_rank())
    copies = {wire: Copy(wire, task) for wire in WIRE_SHARES}
    for number in range(rounds):
        first = number % len(WIRE_SHARES)
        for wire in [*WIRE_SHARES][first:] + [*WIRE_SHARES][:first]:
            copies[wire].train(steps)
        if dist.get_rank() == 0:
            last = ", ".join(f"{wire} {copy.losses[-1]:.3f}" for wire, copy in copies.items())
            print(f"round {number + 1} of {rounds}, loss: {last}", flush=True)
    facts = {wire: copy.facts() | {"predicted_ms": predicted_ms(wire, copies["fp32"])} for wire, copy in copies.items()}
    if dist.get_rank() == 0:
        Path(results_path).write_text(json.dumps(facts))
    dist.destroy_process_group()


def predicted_ms(wire: str, plain: Copy) -> float:
    """What ``gradcast simulate --wire`` says, from the profile that was measured without one."""
    profile = plain.handle.profile
    share = WIRE_SHARES[wire]
    return _core.make_plan(profile, profile.link.scaled(1, share), mode="overlap").predicted_ns / 1e6


def measure(args: argparse.Namespace) -> dict[str, Any]:
    arguments = ["--rounds", str(args.rounds), "--steps", str(args.steps), "--worker"]
    with Network(args.hosts, args.rate) as network:
        return run_for_result(
            "benchmarks.wire_formats", arguments, args.hosts, timeout_s=_TIMEOUT_S, network=network, output=sys.stderr
        )


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
        times, tenth = sorted(each["times_ms"]), len(each["times_ms"]) // 10
        step_ms, means = statistics.median(times), running_means(each["losses"])
        difference = max(abs(a - b) / b for a, b in zip(means, plain_means, strict=True))
        rows.append(
            [
                wire,
                f"{each['wire_bytes'] / 1e6:.2f}",
                f"{step_ms:.1f}",
                f"{times[tenth]:.0f} to {times[-1 - tenth]:.0f}",
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2, help="how many (default: 2)")
    parser.add_argument("--rate", type=parse_bandwidth_bits_per_s, default="100mbit", help="of each link, each way")
    parser.add_argument("--rounds", type=int, default=60, help="turns of each wire format (default: 60)")
    parser.add_argument("--steps", type=int, default=5, help="per turn (default: 5)")
    parser.add_argument("-o", "--output", metavar="PICTURE", help="draw the losses")
    parser.add_argument("--worker", metavar="RESULTS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rounds * args.steps < _MEAN_STEPS:
        parser.error(f"--rounds times --steps has to be at least {_MEAN_STEPS}")
    if args.worker:
        worker(args.rounds, args.steps, args.worker)
        return 0
    facts = measure(args)
    print(f"{args.hosts} hosts, {format_bandwidth(args.rate)}, {len(facts['fp32']['losses'])} steps of each")
    print(table(facts))
    if args.output:
        draw(args.output, facts)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main, "wire_formats"))
