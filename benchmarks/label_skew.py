"""Local steps whose number gradcast chooses (``LocalSteps(every="auto")``), on data that are sorted by label.

    python -m benchmarks.label_skew [--epochs 40] [--seeds 5] [--refresh PAGE]

Runs that the record holds are not repeated.

Four ranks train examples/digits.py's network on scikit-learn's digits, with DDP and with local steps, from the same
parameters and on the same batches. Of each rank's images a share is drawn at random, and the others are sorted by label
over the ranks (0, 60 or 100 %). Bytes are what each rank gives to all-reduces. A third of the images is held out.
"""

import statistics
import sys
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradcast
from benchmarks.on_hosts import TIMEOUT_S, name_of
from benchmarks.pages import append, find_run, parser_of, read_record, run_program, show
from gradcast.lab.models import load_example
from gradcast.lab.workers import run_for_result

_RANKS, _SKEWS = 4, (0, 60, 100)
_HELD_OUT = 597  # of 1,797 images
_BATCH = 25


def shares_of(targets: torch.Tensor, skew: int, chance: torch.Generator) -> list[torch.Tensor]:
    """The images of each rank, by index."""
    order = torch.randperm(len(targets), generator=chance)
    drawn, rest = order.split([count := len(order) * (100 - skew) // 100, len(order) - count])
    rest = rest[targets[rest].argsort(stable=True)]
    return [torch.cat(parts) for parts in zip(drawn.chunk(_RANKS), rest.chunk(_RANKS), strict=True)]


@torch.no_grad()
def accuracy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    return (model(batch[0]).argmax(1) == batch[1]).float().mean().item()


def train(skew: int, seed: int, epochs: int, *, local: bool) -> dict[str, Any]:
    """``local``: with local steps; otherwise with DDP."""
    example = load_example("digits")
    images, targets = example.load_data()
    held_out = images[-_HELD_OUT:], targets[-_HELD_OUT:]
    torch.manual_seed(seed)
    model, chance = example.make_model(), torch.Generator().manual_seed(seed)
    own = shares_of(targets[:-_HELD_OUT], skew, chance)[dist.get_rank()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if local:
        batch = images[own], targets[own]
        steps = gradcast.LocalSteps("auto", evaluate=accuracy, evaluate_metric="accuracy", evaluate_batch=batch)
        handle = gradcast.attach(model, optimizer, options=gradcast.Options(local=steps))
    called = model if local else DistributedDataParallel(model)
    steps, every = 0, []  # H at the end of each epoch
    for _ in range(epochs):
        for indices in own[torch.randperm(len(own), generator=chance)].split(_BATCH):
            optimizer.zero_grad()
            cross_entropy(called(images[indices]), targets[indices]).backward()
            optimizer.step()
            steps += 1
        every.append(handle.stats()["local_steps"]["sync_every"] if local else 1)
    share = 1.0
    if local:
        handle.end_round()
        stats = handle.stats()["local_steps"]
        sent_bytes = steps * sum(parameter.nbytes for parameter in model.parameters())  # with DDP
        share = stats["rounds"] * stats["bytes_per_round"] / sent_bytes
        handle.detach()
    facts = {"skew": skew, "seed": seed, "epochs": epochs, "local": local, "steps": steps, "share": share}
    return facts | {"accuracy": accuracy(model, held_out), "every": every}


def train_all(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One rank."""
    return [train(**job) for job in jobs]


def table(runs: list[dict[str, Any]]) -> str:
    """Means over the seeds; differences are paired by seed."""
    found = {(run["skew"], run["seed"], run["local"]): run for run in runs}
    rows = []
    for skew in _SKEWS:
        pairs = [(run, found[skew, seed, True]) for (k, seed, local), run in found.items() if k == skew and not local]
        points = [100 * (own["accuracy"] - plain["accuracy"]) for plain, own in pairs]
        shares = [own["share"] for _, own in pairs]
        rows.append(
            [
                f"{skew} %",
                f"{100 * statistics.mean(plain['accuracy'] for plain, _ in pairs):.1f}",
                f"{100 * statistics.mean(own['accuracy'] for _, own in pairs):.1f}",
                f"{statistics.mean(points):+.1f} ({min(points):+.1f} to {max(points):+.1f})",
                f"{1 / statistics.mean(shares):.1f} ({1 / max(shares):.1f} to {1 / min(shares):.1f})",
                f"{statistics.mean(statistics.mean(own['every']) for _, own in pairs):.1f}",
                ", ".join(str(own["every"][-1]) for _, own in pairs),
            ]
        )
    head = ["skew", "DDP, %", "auto, %", "points", "times fewer bytes", "mean H", "H at the end, by seed"]
    return tabulate(rows, headers=head, tablefmt="github", disable_numparse=True)


def main() -> None:
    parser = parser_of(__doc__, "label_skew.jsonl")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    variants = [{"epochs": args.epochs, "skew": skew, "local": local} for skew in _SKEWS for local in (False, True)]
    jobs = [variant | {"seed": seed} for seed in range(args.seeds) for variant in variants]
    for seed in range(args.seeds):
        known = read_record(args.record)
        missing = [job for job in jobs if job["seed"] == seed and find_run(known, job) is None]
        if missing:
            for run in run_for_result(name_of(train_all), [missing], _RANKS, timeout_s=TIMEOUT_S):
                append(args.record, run)
    record = read_record(args.record)
    show(table([find_run(record, job) for job in jobs]), "label-skew", args.refresh)


if __name__ == "__main__":
    sys.exit(run_program(main, "label_skew"))
