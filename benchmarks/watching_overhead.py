"""What it costs to look: what `attach` always keeps of every step, and the doctor's watch over ordinary steps.

    python -m benchmarks.watching_overhead [--rounds 15]

Always on, per step and rank: the note of one's own step, those of all ranks taken out of the gradients' buffer, and
where the group lost its time from them (``stats()["exposed"]``); for several numbers of ranks, since a rank reads what
all have written. The doctor: a step of a small model under DDP with one worker, with and without the hooks that watch
it, in turns; and how many microseconds a step is longer by.
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradcast import _core
from gradcast.diagnosis.observe.loader import LoaderTimer
from gradcast.diagnosis.observe.observer import Observer
from gradcast.training.measure.stage_exposure import StageExposure
from gradcast.training.measure.step_trace import StepRecord
from gradcast.training.ranks.step_reports import REPORT_ELEMENTS, StepReport, StepReports

_RANKS = (2, 8, 32, 1024)
_STEPS = 200
_LAYERS, _WIDTH = 20, 32


def always_on_us(rank_count: int) -> float:
    """Median microseconds of one rank's step."""
    sent, other, sums = torch.zeros(3, REPORT_ELEMENTS)
    own = StepReports(sent, lambda: sums, 0, rank_count)
    writers = [StepReports(other, lambda: sums, rank, rank_count) for rank in range(1, rank_count)]
    exposed, record = StageExposure(), StepRecord(0, 0, None, None, 0)
    record.spans += [("backward", 0, 40_000_000), ("forward", 60_000_000, 90_000_000)]
    taken = []
    for step in range(_STEPS):
        # What the others have written comes with the gradients.
        written = torch.zeros(REPORT_ELEMENTS)
        for rank, notes in enumerate(writers, start=1):
            facts = _core.RankFacts(step_ns=1e8, busy_ns=7e7 + 1e5 * rank + step, link_ns=5e7)
            notes._write(StepReport(facts, {"backward": 4e7, "loop": 2e7 + 1e5 * rank, "forward": 4e7}))
            written += other
            notes._iteration += 1
        start_ns = time.perf_counter_ns()
        facts = _core.RankFacts(step_ns=1e8, busy_ns=7e7 + step, link_ns=5e7)
        known = own.exchange(StepReport(facts, exposed.own_stages_ns(record, 1e8)))
        if known is not None:
            exposed.add(known)
        taken.append(time.perf_counter_ns() - start_ns)
        torch.add(sent, written, out=sums)
    assert exposed.stats() is not None, "not all ranks' notes have come"
    return statistics.median(taken[_STEPS // 2 :]) / 1e3


def watched_us(rounds: int) -> tuple[float, list[float]]:
    """A step without the doctor's hooks, and by how much it is longer with them, round by round; microseconds."""
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo")
    module = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))
    ddp = DistributedDataParallel(module)
    sgd = torch.optim.SGD(module.parameters(), lr=0.0)
    samples = torch.utils.data.TensorDataset(torch.randn(8 * _STEPS, _WIDTH))
    loader = torch.utils.data.DataLoader(samples, batch_size=8)

    def steps_us() -> float:
        batches, taken = iter(loader), []
        for _ in range(_STEPS):
            start_ns = time.perf_counter_ns()
            (batch,) = next(batches)
            sgd.zero_grad()
            ddp(batch).sum().backward()
            sgd.step()
            taken.append(time.perf_counter_ns() - start_ns)
        return statistics.median(taken) / 1e3

    steps_us()
    plain, watched = [], []
    for _ in range(rounds):
        plain.append(steps_us())
        watch = LoaderTimer()
        observer = Observer(ddp, [sgd], watch, lambda: None, keep_from=_STEPS * rounds)
        watched.append(steps_us())
        observer.close()
        watch.close()
    dist.destroy_process_group()
    return statistics.median(plain), [after - before for before, after in zip(plain, watched, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="how often plain and watched take turns (default: 15)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [[count, f"{always_on_us(count):.0f}"] for count in _RANKS]
    print(tabulate(rows, headers=["ranks", "always on, us per step"]))
    step_us, more_us = watched_us(args.rounds)
    print(
        f"\nthe doctor's watch: {statistics.median(more_us):.0f} us per step ({min(more_us):.0f} to "
        f"{max(more_us):.0f}), beside {step_us:.0f} us for a step of {2 * _LAYERS} tensors"
    )


if __name__ == "__main__":
    main()
