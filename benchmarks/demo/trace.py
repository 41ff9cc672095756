"""What DDP does in a step, by the clock: its compute, and when each of its buckets is on the wire.

A comm hook does what DDP does by itself, and reads the clock. It costs some time: no traced step counts in the table.
"""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradcast.lab.trainer import Batch, Loss


def trace_ddp(module: torch.nn.Module, loss: Loss, batches: list[Batch], learning_rate: float) -> list[dict[str, Any]]:
    """One entry per step: when its parts began, in ns, and its buckets as [launch_ns, finish_ns, bytes]."""
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=learning_rate, momentum=0.9)
    buckets: list[list[int]] = []
    model.register_comm_hook(buckets, _stamping_hook)
    steps = []
    for inputs, targets in batches:
        buckets.clear()
        forward_ns = time.monotonic_ns()
        optimizer.zero_grad()
        value = loss(model(inputs), targets)
        backward_ns = time.monotonic_ns()
        value.backward()
        update_ns = time.monotonic_ns()
        optimizer.step()
        end_ns = time.monotonic_ns()
        stamps = {"forward_ns": forward_ns, "backward_ns": backward_ns, "update_ns": update_ns, "end_ns": end_ns}
        steps.append({**stamps, "buckets": [list(bucket) for bucket in buckets]})
    return steps


def _stamping_hook(buckets: list[list[int]], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    gradients = bucket.buffer()
    stamps = [time.monotonic_ns(), 0, gradients.numel() * gradients.element_size()]
    buckets.append(stamps)
    work = dist.all_reduce(gradients.mul_(1 / dist.get_world_size()), async_op=True)

    def finished(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        stamps[1] = time.monotonic_ns()
        return future.value()[0]

    return work.get_future().then(finished)
