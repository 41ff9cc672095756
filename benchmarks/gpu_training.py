"""Two ranks that train on one GPU: DDP's numbers, the host's time per step, and traffic beside compute.

    torchrun --standalone --nproc-per-node 2 benchmarks/gpu_training.py [--trace trace.json] [--backend nccl]

Over NCCL each rank passes for a host of its own, because NCCL wants a GPU per rank on a host. That shows right numbers
and order; times over it say nothing.

Fails where gradcast's parameters differ from DDP's in a bit, or, with --trace, where no copy of gradients runs while
the device computes. ``--device cpu`` shows that the rest works.
"""

import argparse
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
from gradcast.intervals import busy_periods_ns

_LAYERS = 12
# After so many gradcast follows its plan: 3 of them measure, 9 hold the plan against what it takes.
WARMUP = 16
MODES = ("ddp", "hook", "overlap")


def as_a_host_of_its_own(rank: int) -> dict[str, str]:
    """Environment in which NCCL lets two ranks use one GPU: it compares hosts before devices. 2.30 has a variable that
    allows it, too."""
    return {
        "NCCL_HOSTID": f"gradcast-rank-{rank}",
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    }


class Training:
    """Layers of this width, in mode "ddp", "hook" or "overlap". ``options``: of gradcast."""

    def __init__(
        self,
        mode: str,
        device: torch.device,
        width: int,
        *,
        layers: int = _LAYERS,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        made = [each for _ in range(layers) for each in (nn.Linear(width, width), norm(width), nn.ReLU())]
        self.module = nn.Sequential(*made).to(device)
        self.sgd = torch.optim.SGD(self.module.parameters(), lr=0.05, momentum=0.9)
        self.model: Any = self.module
        self.handle: Any = None
        if mode == "ddp":
            self.model = DistributedDataParallel(self.module)
        else:
            chosen = gradcast.Options(**{"plan": gradcast.Planning(adapt=False, warmup_steps=3)} | options)
            self.handle = gradcast.attach(self.module, self.sgd if mode == "overlap" else None, options=chosen)

    def step(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns the loss."""
        self.sgd.zero_grad()
        loss = self.model(inputs).square().mean()
        loss.backward()
        self.sgd.step()
        return loss.detach()

    def end(self) -> list[torch.Tensor]:
        if self.handle is not None:
            self.handle.flush()
        parameters = [each.detach().clone() for each in self.module.parameters()]
        if self.handle is not None:
            self.handle.detach()
        return parameters


def device_of(kind: str) -> torch.device:
    """The first device of this kind. Without one the program ends."""
    if kind == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no CUDA device here, or torch cannot use it")
    return torch.device(kind, 0) if kind == "cuda" else torch.device(kind)


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
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=1024, help="of each of the layers")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    parser.add_argument("--trace", metavar="JSON", help="write a trace of some steps, and look for overlap in it")
    args = parser.parse_args()
    device = device_of(args.device)
    if "RANK" not in os.environ:
        print("start it with torchrun --standalone --nproc-per-node 2 (see --help)", file=sys.stderr)
        return 1
    torch.use_deterministic_algorithms(True)
    if args.backend == "nccl":
        os.environ.update(as_a_host_of_its_own(int(os.environ["RANK"])))
        torch.cuda.set_device(device)
    dist.init_process_group(args.backend)
    rank = dist.get_rank()
    try:
        dist.all_reduce(torch.ones(1, device=device))
    except dist.DistBackendError as error:
        print(f"{args.backend} refuses two ranks on {device}: {error}", file=sys.stderr)
        return 1
    failed = run(args, device, rank)
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
