"""What snapshots cost a training, beside torch.save and DCP's async_save as often.

    torchrun --nproc-per-node 2 -m benchmarks.snapshots [--model resnet50 | char_gpt] [--folder /tmp/snapshots]

Trains a stand-in for an accelerator (or char_gpt on the CPU) in overlap mode. gradcast first chooses how often; then
the kinds take turns, each for the steps of two snapshots, and the time of a step is compared with that without
snapshots in the same round. The ranks share this host's loopback, CPUs and disk.
"""

import argparse
import logging
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tabulate import tabulate

import gradcast
from gradcast.lab.models import make_task
from gradcast.lab.settings import Settings

KINDS = ("none", "gradcast", "torch.save", "async_save")


class Training:
    def __init__(self, model: str, scale_size: float) -> None:
        profile = None if model == "char_gpt" else gradcast.load_profile(model).to_json()
        self._task = make_task(Settings(model, profile, (1.0,), (), scale_size=scale_size), dist.get_rank())
        self.module = self._task.module()
        self.optimizer = self._task.optimizer(self.module)
        self.handle = gradcast.attach(self.module, self.optimizer)
        self._count = 0

    def steps(self, count: int, after_step: Callable[[int], None] = lambda _: None) -> float:
        """Seconds of ``count`` steps, all updates included."""
        batches = self._task.batches(self._count, count)
        start_s = time.perf_counter()
        for index, (inputs, targets) in enumerate(batches):
            self.optimizer.zero_grad()
            self._task.loss(self.module(inputs), targets).backward()
            self.optimizer.step()
            after_step(index + 1)
        self.handle.flush()
        self._count += count
        return time.perf_counter() - start_s

    def state(self) -> dict[str, Any]:
        return {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}


def chosen_every(training: Training, folder: Path, steps: int) -> dict[str, Any]:
    """The statistics after so many steps with snapshots as often as gradcast chooses."""
    taking = training.handle.snapshots(folder / "chosen")
    training.steps(steps)
    taking.close()
    return taking.stats()


def timed(training: Training, kind: str, every: int, folder: Path) -> float:
    """Seconds per step over two snapshots, of which the second is not written to the end."""
    shutil.rmtree(folder, ignore_errors=True) if dist.get_rank() == 0 else None
    dist.barrier()
    pending: list[Any] = []

    def save(step: int) -> None:
        if step % every:
            return
        if kind == "torch.save" and dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / f"{step}.pt", "wb") as file:
                torch.save(training.state(), file)
                os.fsync(file.fileno())
        elif kind == "async_save":
            while pending:
                pending.pop().result()
            pending.append(dcp.async_save(training.state(), checkpoint_id=folder / str(step)))

    taking = training.handle.snapshots(folder, every=every) if kind == "gradcast" else None
    duration_s = training.steps(2 * every + 1, save)  # of the second snapshot only the copy is in it
    while pending:
        pending.pop().result()
    if taking is not None:
        taking.close()
    return duration_s / (2 * every + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--scale-size", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/gradcast-snapshots"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--settle-steps", type=int, default=60, help="until the number of steps is taken as chosen")
    args = parser.parse_args()
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = args.folder / str(os.getppid())
    training = Training(args.model, args.scale_size)
    training.steps(30)  # the warm-up, and the plan's first steps
    told = chosen_every(training, folder, args.settle_steps)
    rounds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(args.rounds):
        seconds = {kind: timed(training, kind, told["every"], folder / kind) for kind in KINDS}
        for kind, each in seconds.items():
            rounds[kind].append(each)
    if dist.get_rank() == 0:
        print(f"{args.model}: {' '.join(f'{k}={v}' for k, v in told.items())}")
        rows = []
        for kind in KINDS:
            longer = sorted(100 * (each / none - 1) for each, none in zip(rounds[kind], rounds["none"], strict=True))
            spread = f"{longer[0]:.1f} to {longer[-1]:.1f}"
            rows.append([kind, statistics.median(rounds[kind]) * 1e3, statistics.median(longer), spread])
        print(tabulate(rows, headers=["", "ms per step", "longer by %", "rounds"], floatfmt=".1f"))
        shutil.rmtree(folder)
    training.handle.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
