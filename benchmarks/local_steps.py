"""Steps and bytes of local steps beside what is predicted for them, in the laboratory.

    python -m benchmarks.local_steps [--hosts 2] [--ratios 2,6,20] [--every 5,10,20,50] [--refresh PAGE]

A stand-in for ResNet-18 whose tensors have 6 MB in all computes for 40 ms a step, on hosts with links so slow that its
parameters travel in 2, 6 and 20 times that (root, iproute2). Each training is measured over whole rounds, after the
first two. Predicted is max(compute, communication / H) streamed and compute + communication / H blocking. Compute is
the step of one rank alone with the same local steps, so it includes the outer update; communication is what the round's
all-reduces take one after the other on the idle network.
"""

import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.nn.parallel import DistributedDataParallel

import gradcast
from benchmarks.on_hosts import measured
from benchmarks.pages import parser_of, run_program, show
from gradcast.comparison.compare import total_bytes
from gradcast.lab.cores import sent_bytes
from gradcast.lab.models import Task, make_task
from gradcast.lab.settings import Settings
from gradcast.lab.trainer import Training
from gradcast.local_steps import predicted_step_ns

_MODEL_BYTES = 6e6
_COMPUTE_MS = 40.0
_STEPS_MIN = 40  # that are measured of each training
_PLAIN_STEPS = 12
_REPEATS = 5  # of the communication of a round
_FORMS = {"streamed": {}, "blocking": {"overlap": 0}}


def communication_ms(block_bytes: list[int]) -> float:
    """All-reduces of these sizes, one after the other, on the idle network."""
    tensors = [torch.zeros(size // 4) for size in block_bytes]
    times = []
    for _ in range(_REPEATS):
        dist.barrier()
        start = time.perf_counter()
        for each in tensors:
            dist.all_reduce(each)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def largest(value: float) -> float:
    """Over the ranks: a step ends when the slowest rank's does."""
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def whole_rounds(
    task: Task, options: gradcast.Options, group: dist.ProcessGroup | None
) -> tuple[gradcast.Handle, float, float]:
    """A training with local steps in this group (None: all ranks), with the mean time and sent bytes of a step."""
    module = task.module()
    optimizer = task.optimizer(module)
    handle = gradcast.attach(module, optimizer, process_group=group, options=options)
    every = options.local.every
    training = Training(task, module, optimizer)
    training.train(2 * every)  # the first sends nothing
    count = every * -(-_STEPS_MIN // every)
    before = sent_bytes()
    step_ms = 1e3 * training.duration_s(count) / count
    return handle, largest(step_ms), (sent_bytes() - before) / count


def local(task: Task, every: int, form: str, alone: dist.ProcessGroup) -> dict[str, Any]:
    """``alone``: a group of this rank."""
    options = gradcast.Options(local=gradcast.LocalSteps(every, **_FORMS[form]))
    handle, compute_ms, _ = whole_rounds(task, options, alone)
    handle.detach()
    handle, step_ms, sent = whole_rounds(task, options, None)
    round_ms = communication_ms([block.size_bytes for block in handle.plan.blocks])
    stats = handle.stats()["local_steps"]
    handle.detach()
    predicted_ms = predicted_step_ns(compute_ms, round_ms, every, is_streamed=form == "streamed")
    return {
        "every": every,
        "form": form,
        "step_ms": step_ms,
        "compute_ms": compute_ms,
        "predicted_ms": predicted_ms,
        "communication_ms": round_ms,
        "sent_bytes": sent,
        "fragments": stats["fragments"],
    }


def train(settings: Settings, every: list[int]) -> dict[str, Any]:
    """One rank."""
    task = make_task(settings, dist.get_rank())
    module = task.module()
    plain = Training(task, module, task.optimizer(module))
    task.device.factor = _COMPUTE_MS / statistics.median(plain.train(_PLAIN_STEPS))
    compute_ms = largest(statistics.median(plain.train(_PLAIN_STEPS)))
    ddp = Training(task, DistributedDataParallel(module), plain.optimizer)
    ddp.train(3)
    dist.barrier()
    before = sent_bytes()
    ddp_ms = largest(statistics.median(ddp.train(_PLAIN_STEPS)))
    ddp_sent = (sent_bytes() - before) / _PLAIN_STEPS
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    alone = groups[dist.get_rank()]
    found = [local(task, each, form, alone) for each in every for form in _FORMS]
    return {"compute_ms": compute_ms, "ddp_ms": ddp_ms, "ddp_sent_bytes": ddp_sent, "runs": found}


def measure(hosts: int, ratio: float, every: list[int]) -> dict[str, Any]:
    profile = gradcast.load_profile("resnet18")
    leaving_bytes = 2 * (hosts - 1) / hosts * _MODEL_BYTES
    rate = 8e3 * leaving_bytes / (ratio * _COMPUTE_MS)
    settings = Settings("resnet18", profile.to_json(), scale_size=_MODEL_BYTES / total_bytes(profile))
    return measured(train, hosts, rate, settings, every, promptly=True)


def table(found: dict[float, dict[str, Any]]) -> str:
    head = [
        "communication / compute", "H", "form", "fragments", "DDP, ms", "compute, ms", "predicted, ms", "measured, ms",
        "error", "bytes per step times H, of DDP's",
    ]  # fmt: skip
    rows = []
    for ratio, facts in found.items():
        for run in facts["runs"]:
            share = run["sent_bytes"] * run["every"] / facts["ddp_sent_bytes"]
            rows.append(
                [
                    f"{ratio:g}",
                    run["every"],
                    run["form"],
                    run["fragments"],
                    f"{facts['ddp_ms']:.0f}",
                    f"{run['compute_ms']:.1f}",
                    f"{run['predicted_ms']:.1f}",
                    f"{run['step_ms']:.1f}",
                    f"{run['step_ms'] / run['predicted_ms'] - 1:+.1%}",
                    f"{share:.3f}",
                ]
            )
    return tabulate(rows, headers=head, tablefmt="github", disable_numparse=True)


def numbers(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--hosts", type=int, default=2, help="how many (default: 2)")
    parser.add_argument("--ratios", type=numbers, default="2,6,20", help="communication over compute")
    parser.add_argument("--every", type=numbers, default="5,10,20,50", help="H, in steps")
    args = parser.parse_args()
    every = [int(each) for each in args.every]
    found = {ratio: measure(args.hosts, ratio, every) for ratio in args.ratios}
    for ratio, facts in found.items():
        print(f"{ratio:g}: compute {facts['compute_ms']:.1f} ms, DDP {facts['ddp_ms']:.1f} ms", file=sys.stderr)
    show(table(found), "local-steps", args.refresh)


if __name__ == "__main__":
    sys.exit(run_program(main, "local_steps"))
