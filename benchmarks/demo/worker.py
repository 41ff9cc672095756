"""One rank of the demo: ``python -m benchmarks.demo.worker TASK SETTINGS RESULTS``, with the environment of torchrun.

The task "compute" finds out how long a step computes. The task "train" trains a model per mode, the modes in turns, so
that whatever else the machine does falls on all of them alike. Rank 0 prints the progress and writes what it measured
to the file RESULTS.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from benchmarks.demo.data import Digits
from benchmarks.demo.modes import MODES
from benchmarks.demo.settings import Settings
from benchmarks.demo.trace import trace_ddp
from gradcast.lab.trainer import Trainer
from gradcast.lab.variants import BASELINE, COMPUTE, variant

_COMPUTE_STEPS = 12
_FIRST_STEPS = 4  # slower than the others: memory and threads are new


def main(task: str, settings: Settings, results_path: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {"compute": _compute, "train": _train}[task](settings)
    if dist.get_rank() == 0:
        results_path.write_text(json.dumps(results))
    dist.destroy_process_group()


def _compute(settings: Settings) -> dict[str, Any]:
    digits = Digits(settings)
    trainer = _trainer(COMPUTE, digits, settings)
    dist.barrier()
    steps_ms = list(trainer.steps(digits.batches(0, _COMPUTE_STEPS)))
    return {
        "compute_ms": statistics.median(steps_ms[_FIRST_STEPS:]),
        "parameter_bytes": _parameter_bytes(trainer),
    }


def _trainer(mode: str, digits: Digits, settings: Settings) -> Trainer:
    module = digits.model()
    # SGD, because Adam enlarges differences of rounding.
    optimizer = torch.optim.SGD(module.parameters(), lr=settings.learning_rate, momentum=0.9)
    return Trainer(variant(mode), module, optimizer, cross_entropy)


def _train(settings: Settings) -> dict[str, Any]:
    digits = Digits(settings)
    trainers = [_trainer(mode, digits, settings) for mode in MODES]
    rounds = [_round(settings, digits, trainers, number) for number in range(settings.rounds)]
    batches = digits.batches(0, settings.traced_steps)
    trace = trace_ddp(digits.model(), cross_entropy, batches, settings.learning_rate)
    results = {
        "parameter_bytes": _parameter_bytes(trainers[0]),
        "rounds": rounds,
        "accuracy": {trainer.variant.name: digits.accuracy(trainer.module) for trainer in trainers},
        "ddp_trace": trace,
        "gradcast": {trainer.variant.name: _facts(trainer) for trainer in trainers if trainer.handle},
    }
    for trainer in trainers:
        trainer.detach()
    return results


def _round(settings: Settings, digits: Digits, trainers: list[Trainer], number: int) -> dict[str, Any]:
    """Every mode trains on the same batches; then their parameters are compared."""
    batches = digits.batches(number * settings.steps, settings.steps)
    _tell(f"round {number + 1} of {settings.rounds}, ms per step:", end="")
    steps_ms = {}
    for trainer in trainers:
        dist.barrier()
        mode = trainer.variant.name
        steps_ms[mode] = list(trainer.steps(batches))
        trainer.finish()
        _tell(f"  {MODES[mode]} {statistics.median(steps_ms[mode]):.0f}", end="")
    _tell("  (warm-up)" if number == 0 else "")
    return {"steps_ms": steps_ms, "differences": _differences(trainers)}


def _differences(trainers: list[Trainer]) -> dict[str, float]:
    """The largest difference of any parameter to DDP's, on any rank."""
    reference = next(trainer for trainer in trainers if trainer.variant.name == BASELINE)
    compared = [trainer for trainer in trainers if trainer.variant.name not in (BASELINE, COMPUTE)]
    largest = torch.tensor([_difference(trainer, reference) for trainer in compared])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return {trainer.variant.name: float(value) for trainer, value in zip(compared, largest, strict=True)}


def _difference(one: Trainer, other: Trainer) -> float:
    pairs = zip(one.module.parameters(), other.module.parameters(), strict=True)
    # By torch's maximum, which a NaN does not escape.
    return torch.stack([(left.detach() - right.detach()).abs().max() for left, right in pairs]).max().item()


def _parameter_bytes(trainer: Trainer) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in trainer.module.parameters())


def _facts(trainer: Trainer) -> dict[str, Any]:
    handle = trainer.handle
    return {
        "stats": handle.stats(),
        "timeline": handle.timeline(),
        "profile": json.loads(handle.profile.to_json()),
        "plan": json.loads(handle.plan.to_json()),
    }


def _tell(text: str, end: str = "\n") -> None:
    if dist.get_rank() == 0:
        print(text, end=end, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Settings.from_json(sys.argv[2]), Path(sys.argv[3]))
