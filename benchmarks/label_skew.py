"""Local steps whose number gradcast chooses (``Options(sync_every="auto")``), on data that are sorted by label.

    python -m benchmarks.label_skew [--epochs 40] [--seeds 5] [--refresh PAGE]

Four ranks train examples/digits.py's network on scikit-learn's digits, with DDP and with local steps, from the same
parameters and on the same batches. Of each rank's images a share is drawn at random, and the others are sorted by label
over the ranks (0, 60 or 100 %). Bytes are what each rank gives to all-reduces. A third of the images is held out.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradcast
from benchmarks.pages import append, parser_of, read_record, run_program, show
from gradcast.lab.models import load_example
from gradcast.lab.workers import run_for_result

_RANKS, _SKEWS = 4, (0, 60, 100)
_HELD_OUT = 597  # of 1,797 images
_BATCH = 25
_TIMEOUT_S = 600.0
VARIANTS: list[dict[str, Any] | None] = [None, {"sync_every": "auto"}, {"sync_every": "auto", "outer": "average"}]


def shares_of(targets: torch.Tensor, skew: int, chance: torch.Generator) -> list[torch.Tensor]:
    """The images of each rank, by index."""
    order = torch.randperm(len(targets), generator=chance)
    drawn, rest = order.split([count := len(order) * (100 - skew) // 100, len(order) - count])
    rest = rest[targets[rest].argsort(stable=True)]
    return [torch.cat(parts) for parts in zip(drawn.chunk(_RANKS), rest.chunk(_RANKS), strict=True)]


@torch.no_grad()
def accuracy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    return (model(batch[0]).argmax(1) == batch[1]).float().mean().item()


def train(skew: int, seed: int, epochs: int, options: dict[str, Any] | None) -> dict[str, Any]:
    """``options``: None for DDP."""
    example = load_example("digits")
    images, targets = example.load_data()
    held_out = images[-_HELD_OUT:], targets[-_HELD_OUT:]
    torch.manual_seed(seed)
    model, chance = example.make_model(), torch.Generator().manual_seed(seed)
    own = shares_of(targets[:-_HELD_OUT], skew, chance)[dist.get_rank()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    called, handle = model, None
    if options is None:
        called = DistributedDataParallel(model)
    else:
        auto = {"evaluate": accuracy, "evaluate_metric": "accuracy", "evaluate_batch": (images[own], targets[own])}
        chosen = options | (auto if options["sync_every"] == "auto" else {})
        handle = gradcast.attach(model, optimizer, options=gradcast.Options(**chosen))
    steps, every = 0, []
    for _ in range(epochs):
        for indices in own[torch.randperm(len(own), generator=chance)].split(_BATCH)[: len(own) // _BATCH]:
            optimizer.zero_grad()
            cross_entropy(called(images[indices]), targets[indices]).backward()
            optimizer.step()
            steps += 1
            every.append(1 if handle is None else handle.stats()["local_steps"]["sync_every"])
    share = 1.0
    if handle is not None:
        handle.end_round()
        share = handle.stats()["local_steps"]["rounds"] / steps
        handle.detach()
    facts = {"skew": skew, "seed": seed, "epochs": epochs, "options": options, "steps": steps, "share": share}
    return facts | {"accuracy": accuracy(model, held_out), "every": every[-1], "path": every[::_BATCH]}


def worker(jobs: list[dict[str, Any]], results_path: str) -> None:
    """One rank; rank 0 writes what it measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = [train(**job) for job in jobs]
    if dist.get_rank() == 0:
        Path(results_path).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def table(runs: list[dict[str, Any]]) -> str:
    """Accuracies are means over the seeds, and differences are paired by seed."""
    plain = {(run["skew"], run["seed"]): run["accuracy"] for run in runs if run["options"] is None}
    rows = []
    for skew in _SKEWS:
        for options in [each for each in VARIANTS if each is not None]:
            own = [run for run in runs if run["skew"] == skew and run["options"] == options]
            if not own:
                continue
            theirs = [plain[skew, run["seed"]] for run in own]
            points = [100 * (run["accuracy"] - other) for run, other in zip(own, theirs, strict=True)]
            rows.append(
                [
                    f"{skew} %",
                    options.get("outer", "nesterov"),
                    f"{100 * statistics.mean(theirs):.1f}",
                    f"{100 * statistics.mean(run['accuracy'] for run in own):.1f}",
                    f"{statistics.mean(points):+.1f} ({min(points):+.1f} to {max(points):+.1f})",
                    f"{1 / statistics.mean(run['share'] for run in own):.1f}",
                    ", ".join(str(run["every"]) for run in own),
                ]
            )
    head = ["skew", "outer", "DDP, %", "auto, %", "difference, points", "times fewer bytes", "H at the end, by seed"]
    return tabulate(rows, headers=head, tablefmt="github", disable_numparse=True)


def main() -> int:
    parser = parser_of(__doc__, "label_skew.jsonl")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--worker", metavar="RESULTS", help=argparse.SUPPRESS)
    parser.add_argument("--jobs", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.jobs, args.worker)
        return 0
    seeds = range(args.seeds)
    jobs = [
        {"skew": k, "seed": s, "epochs": args.epochs, "options": o} for s in seeds for k in _SKEWS for o in VARIANTS
    ]
    for job in jobs:
        if not any(job.items() <= known.items() for known in read_record(args.record)):
            arguments = ["--jobs", json.dumps([job]), "--worker"]
            for run in run_for_result("benchmarks.label_skew", arguments, _RANKS, timeout_s=_TIMEOUT_S):
                append(args.record, run)
    runs = [run for run in read_record(args.record) if any(job.items() <= run.items() for job in jobs)]
    show(table(runs), "label-skew", args.refresh)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main, "label_skew"))
