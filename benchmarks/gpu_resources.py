"""The memory, threads and open files that a rank holds while it trains, on device and host. Cases of gpu_cases.py.

``memory``: before and after ``attach``, with the plan, and how much it has grown when many steps later training ends.
``tiny_steps``: thousands of steps that compute next to nothing, with accumulation, evaluation and ``flush()`` between
them; nothing may grow, and the numbers have to be DDP's.
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.gpu_training import Training

if TYPE_CHECKING:
    from benchmarks.gpu_cases import Rank

_SETTLED = 0.2  # of the steps
_MEMORY_STEPS, _MEMORY_WIDTH = 500, 512
_TINY_STEPS, _TINY_WIDTH = 2000, 16
_LAYERS = 4
_MIB = 1 << 20
# Allocators keep pages, and both sides keep records of a bounded number of steps.
_HOST_GROWTH, _HOST_GROWTH_MIB, _DEVICE_GROWTH_MIB = 0.05, 4.0, 1.0


def held(device: torch.device) -> dict[str, float]:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return {
        "device, MiB": torch.cuda.memory_allocated(device) / _MIB if device.type == "cuda" else 0.0,
        "host, MiB": pages * os.sysconf("SC_PAGE_SIZE") / _MIB,
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
    }


def grown(first: dict[str, float], last: dict[str, float]) -> list[str]:
    allowed = {"device, MiB": _DEVICE_GROWTH_MIB, "host, MiB": first["host, MiB"] * _HOST_GROWTH + _HOST_GROWTH_MIB}
    return [
        f"{name} has grown from {first[name]:g} to {last[name]:g}"
        for name in first
        if last[name] > first[name] + allowed.get(name, 0)
    ]


def _say(rank: "Rank", what: str, found: dict[str, float]) -> None:
    if rank.index == 0:
        print(f"measured: {what}: " + "; ".join(f"{name} {number:.5g}" for name, number in found.items()), flush=True)


def memory(rank: "Rank") -> Iterator[str]:
    steps = rank.steps or _MEMORY_STEPS
    batch = torch.randn(32, _MEMORY_WIDTH, device=rank.device)
    for mode in ("hook", "overlap"):
        training = Training("alone", rank.device, _MEMORY_WIDTH, layers=_LAYERS)
        size = sum(each.nbytes for each in training.module.parameters()) / _MIB
        for _ in range(2):
            training.step(batch)
        _say(rank, f"{mode} mode, gradients of {size:.1f} MiB, before attach", held(rank.device))
        training.attach(mode)
        _say(rank, f"{mode} mode, after attach", held(rank.device))
        for number in range(steps):
            training.step(batch)
            if number == int(_SETTLED * steps):
                training.handle.flush()
                first = held(rank.device)
        training.handle.flush()
        last = held(rank.device)
        training.end()
        _say(rank, f"{mode} mode, after {int(_SETTLED * steps)} steps", first)
        _say(rank, f"{mode} mode, after {steps} steps", last)
        yield from grown(first, last)


def tiny_steps(rank: "Rank") -> Iterator[str]:
    steps = rank.steps or _TINY_STEPS
    generator = torch.Generator().manual_seed(rank.index)
    batches = [torch.randn(8, _TINY_WIDTH, generator=generator).to(rank.device) for _ in range(7)]
    theirs, _, _ = _take_tiny_steps(Training("ddp", rank.device, _TINY_WIDTH, layers=_LAYERS), batches, steps)
    for mode in ("hook", "overlap"):
        training = Training(mode, rank.device, _TINY_WIDTH, layers=_LAYERS)
        ours, first, last = _take_tiny_steps(training, batches, steps)
        _say(rank, f"{mode} mode, after {int(_SETTLED * steps)} tiny steps", first)
        _say(rank, f"{mode} mode, after {steps} tiny steps", last)
        yield from grown(first, last)
        if not all(map(torch.equal, ours, theirs)):
            yield f"after {steps} tiny steps the numbers differ from DDP's in {mode} mode"


def _take_tiny_steps(
    training: Training, batches: list[torch.Tensor], steps: int
) -> tuple[list[torch.Tensor], dict[str, float], dict[str, float]]:
    """Returns the numbers, and what is held after some steps and in the end."""
    device = batches[0].device
    first: dict[str, float] = {}
    for number in range(steps):
        batch = batches[number % len(batches)]
        training.sgd.zero_grad()
        if number % 5 == 3:
            with training.no_sync():
                training.backward(batch)
        training.backward(batch)
        training.sgd.step()
        if number % 50 == 20:
            training.module.eval()
            with torch.no_grad():
                training.model(batch)
            training.module.train()
        if number % 50 == 40 and training.handle is not None:
            training.handle.flush()
        if number == int(_SETTLED * steps):
            first = held(device)
    last = held(device)
    return training.end(), first, last
