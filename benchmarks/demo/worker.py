"""One rank of the demo.

It trains a model per mode, the modes in turns, so that whatever else the machine does falls on all of them alike.
Rank 0 prints the progress.
"""

import json
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.demo.results import MODES
from benchmarks.demo.training import Digits, Settings
from gradcast.lab.models import Batch
from gradcast.lab.trainer import Trainer
from gradcast.lab.variants import variant
from gradcast.lab.worker import differences, tell


def train(settings: Settings) -> dict[str, Any]:
    digits = Digits(settings)
    trainers = [Trainer(variant(mode), digits) for mode in MODES]
    tell("warm-up", end="")
    rounds = [_round(trainers, digits.batches(0, settings.warmup_steps), digits)]
    for number in range(settings.rounds):
        tell(f"round {number + 1} of {settings.rounds}", end="")
        batches = digits.batches(settings.warmup_steps + number * settings.steps, settings.steps)
        rounds.append(_round(trainers, batches, digits))
    results = {
        "rounds": rounds,
        "accuracy": {trainer.variant.name: digits.accuracy(trainer.module) for trainer in trainers},
        "ddp_trace": _trace_ddp(digits, settings),
        "gradcast": {trainer.variant.name: _facts(trainer) for trainer in trainers if trainer.handle},
    }
    for trainer in trainers:
        trainer.detach()
    return results


def _round(trainers: list[Trainer], batches: list[Batch], digits: Digits) -> dict[str, Any]:
    """Every mode trains on the same batches; then their parameters are compared."""
    tell(", ms per step:", end="")
    steps_ms = {}
    for trainer in trainers:
        dist.barrier()
        mode = trainer.variant.name
        steps_ms[mode] = list(trainer.steps(batches))
        trainer.finish()
        tell(f"  {MODES[mode]} {statistics.median(steps_ms[mode]):.0f}", end="")
    tell("")
    return {"steps_ms": steps_ms, "differences": differences(trainers, digits.module())}


def _facts(trainer: Trainer) -> dict[str, Any]:
    handle = trainer.handle
    return {
        "timeline": handle.timeline(),
        "profile": json.loads(handle.profile.to_json()),
        "plan": json.loads(handle.plan.to_json()),
    }


def _trace_ddp(digits: Digits, settings: Settings) -> list[dict[str, Any]]:
    """What DDP does in a step, by the clock: when its parts begin, in ns, and its buckets as [launch, finish, bytes].

    A comm hook does what DDP does by itself, and reads the clock. It costs some time: no traced step counts.
    """
    module = digits.module()
    model = DistributedDataParallel(module)
    optimizer = digits.optimizer(module)
    buckets: list[list[int]] = []
    model.register_comm_hook(buckets, _stamping_hook)
    steps = []
    for inputs, targets in digits.batches(0, settings.traced_steps):
        buckets.clear()
        forward_ns = time.monotonic_ns()
        optimizer.zero_grad()
        value = digits.loss(model(inputs), targets)
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
