"""Two ranks that train on one GPU: DDP's numbers, the host's time per step, and traffic beside compute.

    python -m benchmarks.gpu_training [--trace trace.json] [--backend gloo]

Over NCCL (see gpu_ranks.py) it shows right numbers and order; times say nothing then.

Fails where gradcast's parameters differ from DDP's in a bit, or, with --trace, where no copy of gradients runs while
the device computes. ``--device cpu`` shows that the rest works.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradcast
from benchmarks import gpu_ranks as ranks
from gradcast.intervals import busy_periods_ns

_LAYERS = 12
# After so many gradcast follows its plan: 3 of them measure, 9 hold the plan against what it takes.
WARMUP = 16
MODES = ("ddp", "hook", "overlap")


class Training:
    """Layers of this width, in mode "ddp", "hook" or "overlap", or "alone" until ``attach``. ``options``: as there."""

    def __init__(
        self,
        mode: str,
        device: torch.device,
        width: int,
        *,
        layers: int = _LAYERS,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
        compile_mode: str | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        made = [each for _ in range(layers) for each in (nn.Linear(width, width), norm(width), nn.ReLU())]
        self.module = nn.Sequential(*made).to(device)
        if compile_mode is not None:
            for each in self.module[::3]:
                each.compile(mode=compile_mode)
        self.sgd = torch.optim.SGD(self.module.parameters(), lr=0.05, momentum=0.9)
        self.model: Any = self.module
        self.handle: Any = None
        if mode == "ddp":
            self.model = DistributedDataParallel(self.module)
        elif mode != "alone":
            self.attach(mode, **options)

    def attach(self, mode: str, *, around_ddp: bool = False, process_group: Any = None, **options: Any) -> None:
        """``around_ddp``: to a DDP around the module, as the README does. ``options``: of gradcast."""
        if around_ddp:
            self.model = DistributedDataParallel(self.module)
        chosen = gradcast.Options(**{"plan": gradcast.Planning(adapt=False, warmup_steps=3)} | options)
        optimizer = self.sgd if mode == "overlap" else None
        self.handle = gradcast.attach(self.model, optimizer, process_group=process_group, options=chosen)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return (self.handle or self.model).no_sync()

    def backward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns the loss."""
        loss = self.model(inputs).square().mean()
        loss.backward()
        return loss.detach()

    def step(self, inputs: torch.Tensor) -> torch.Tensor:
        self.sgd.zero_grad()
        loss = self.backward(inputs)
        self.sgd.step()
        return loss

    def end(self) -> list[torch.Tensor]:
        """Returns the parameters and buffers."""
        if self.handle is not None:
            self.handle.flush()
        tensors = [each.detach().clone() for each in (*self.module.parameters(), *self.module.buffers())]
        if self.handle is not None:
            self.handle.detach()
        return tensors


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measured(
    training: Training, batches: Iterable[torch.Tensor], device: torch.device
) -> tuple[list[float], list[float]]:
    """ms per step: of the host until step() has returned, and until the device has done what it was given by then. In
    overlap mode blocks may still be on their way, and the next step waits for them."""
    host_ms, whole_ms = [], []
    for inputs in batches:
        synchronize(device)
        start_ns = time.perf_counter_ns()
        training.step(inputs)
        host_ms.append((time.perf_counter_ns() - start_ns) / 1e6)
        synchronize(device)
        whole_ms.append((time.perf_counter_ns() - start_ns) / 1e6)
    return host_ms[WARMUP:], whole_ms[WARMUP:]


def traced(run: Callable[[], None], path: str) -> list[dict[str, Any]]:
    """The events of a Chrome trace, torch's own, of what ``run`` does."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    profile.export_chrome_trace(path)
    return json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]


def together_ms(events: Iterable[dict[str, Any]]) -> float:
    """ms for which, in a Chrome trace, a copy runs while a kernel runs on another stream."""
    spans: dict[str, list[tuple[float, float, Any]]] = {"kernel": [], "gpu_memcpy": []}
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in spans:
            spans[event["cat"]].append((event["ts"], event["ts"] + event["dur"], event["args"].get("stream")))
    overlaps = (
        (max(begin, first), min(end, last))
        for begin, end, stream in spans["gpu_memcpy"]
        for first, last, other in spans["kernel"]
        if stream != other and max(begin, first) < min(end, last)
    )
    return sum(busy_periods_ns(overlaps)) / 1e3  # here in us


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ranks.add_options(parser)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, help="of each of the layers (default: 1024, on the CPU 64)")
    parser.add_argument("--trace", metavar="JSON", help="write a trace of some steps, and look for overlap in it")
    parser.add_argument(
        "--limit", type=float, default=600, help="seconds after which hung ranks are ended (default: 600)"
    )
    args = ranks.parsed(parser)
    args.width = args.width or (1024 if args.device == "cuda" else 64)
    if "RANK" in os.environ:
        return be_rank(args)
    ranks.device_of(args.device)
    arguments = ["--steps", str(args.steps), "--width", str(args.width)]
    arguments += ["--trace", args.trace] if args.trace else []
    while True:
        ended = ranks.start("benchmarks.gpu_training", arguments, args, args.limit)
        if not ranks.falls_back(ended, args):
            return 0 if ended.codes == [0] * ranks.COUNT else 1


def be_rank(args: argparse.Namespace) -> int:
    device = ranks.begin(args, timeout_s=args.limit)
    failed = run(args, device, dist.get_rank())
    dist.barrier()
    dist.destroy_process_group()
    return 1 if failed else 0


def run(args: argparse.Namespace, device: torch.device, rank: int) -> bool:
    """Whether something is not as it should be."""
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randn(64, args.width, generator=generator).to(device) for _ in range(args.steps)]
    rows, parameters = [], {}
    for mode in MODES:
        training = Training(mode, device, args.width)
        host_ms, whole_ms = measured(training, batches, device)
        parameters[mode] = training.end()
        if host_ms:
            rows.append([mode, *(f"{statistics.median(each):.2f}" for each in (host_ms, whole_ms))])
    different = [
        mode
        for mode in MODES
        if any(not torch.equal(a, b) for a, b in zip(parameters[mode], parameters["ddp"], strict=True))
    ]
    if rank == 0 and rows:
        print(tabulate(rows, ["", "host, ms per step", "until the device is idle, ms"]))
    if different:
        print(f"rank {rank}: the parameters differ from DDP's in {' and '.join(different)} mode", file=sys.stderr)
        return True
    if rank == 0:
        print(f"the parameters are DDP's, bit for bit, after {args.steps} steps in both modes")
    return args.trace is not None and not overlaps(args, device, rank, batches)


def overlaps(args: argparse.Namespace, device: torch.device, rank: int, batches: list[torch.Tensor]) -> bool:
    training = Training("overlap", device, args.width)
    for inputs in batches:
        training.step(inputs)
    with tempfile.TemporaryDirectory() as folder:
        path = args.trace if rank == 0 else os.path.join(folder, "trace.json")
        copying_ms = together_ms(traced(lambda: [training.step(inputs) for inputs in batches[:5]], path))
    training.end()
    if rank == 0:
        print(f"in 5 steps gradients were copied for {copying_ms:.2f} ms while the device computed ({args.trace})")
    return copying_ms > 0


if __name__ == "__main__":
    sys.exit(main())
