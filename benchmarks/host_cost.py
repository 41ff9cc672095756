"""What gradcast costs the training thread beside stock DDP, where compute costs nearly nothing.

    python benchmarks/host_cost.py [--rounds 15] [--case "AdamW foreach"] [--blocks 6]

Two workers train the same model of 300 small tensors four times, by turns of ten steps: in a plain loop, with DDP, in
hook mode and in overlap mode. Counted is the CPU time of the thread that trains (hooks, `step`, `zero_grad`, waiting,
and updating by parts), not the time that it waits. Printed are microseconds per step, and what a mode adds to the plain
loop relative to what DDP adds: the median of the rounds, and the quartiles. The overlap plan has so many blocks in the
order of forward, which need most calls of the optimizer.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradcast
from gradcast.lab import run_workers
from gradcast.training.plan.agreement import plan_text

_LAYERS = 150  # of two tensors
_WIDTH = 8
_TURN_STEPS = 10
_TIMEOUT_S = 3600.0
_CASES = {
    "AdamW foreach": (torch.optim.AdamW, {"foreach": True}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "SGD foreach": (torch.optim.SGD, {"foreach": True, "momentum": 0.9}),
    "SGD fused": (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
}


class Training:
    """One loop of one kind: plain, DDP, hook or overlap."""

    def __init__(self, kind: str, case: str, plan: str | None = None) -> None:
        torch.manual_seed(0)
        self.module: nn.Module = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))
        make, settings = _CASES[case]
        self.optimizer = make(self.module.parameters(), lr=1e-3, **settings)
        self.handle = None
        if kind == "DDP":
            self.module = DistributedDataParallel(self.module)
        elif kind != "plain":
            given = self.optimizer if kind == "overlap" else None
            options = gradcast.Options(plan=gradcast.Planning(file=plan))
            self.handle = gradcast.attach(self.module, given, options=options)
        self._batch = torch.randn(1, _WIDTH)

    def turn_us(self, steps: int = _TURN_STEPS) -> float:
        """CPU microseconds of this thread per step."""
        dist.barrier()
        start_ns = time.thread_time_ns()
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.module(self._batch).sum().backward()
            self.optimizer.step()
        if self.handle is not None:
            self.handle.flush()
        return (time.thread_time_ns() - start_ns) / steps / 1e3


def make_plan(folder: Path, case: str, mode: str, block_count: int) -> str:
    """Writes a plan of equal blocks in the order of forward (overlap) or of backward (hook)."""
    training = Training(mode, case)
    training.turn_us()
    path = folder / f"{mode}.json"
    if dist.get_rank() == 0:
        profile = training.handle.profile
        ends = [0, *itertools.accumulate(tensor.bytes for tensor in profile.tensors)]
        cuts = [ends[len(profile.tensors) * number // block_count] for number in range(block_count + 1)]
        blocks = [gradcast.Block(buffer=0, ranges=[cut], reason="benchmark") for cut in itertools.pairwise(cuts)]
        first = min(range(len(profile.tensors)), key=lambda index: profile.tensors[index].need_ns)
        if (first > len(profile.tensors) // 2) == (mode == "overlap"):
            blocks.reverse()
        plan = gradcast.Plan(blocks=blocks, policy="benchmark", mode=mode, in_flight=1)
        path.write_text(plan_text(plan, profile, None))
    training.handle.detach()
    dist.barrier()
    return str(path)


def measure(case: str, folder: Path, rounds: int, block_count: int) -> None:
    plans = {mode: make_plan(folder, case, mode, block_count) for mode in ("hook", "overlap")}
    trainings = {kind: Training(kind, case, plans.get(kind)) for kind in ("plain", "DDP", "hook", "overlap")}
    for training in trainings.values():  # warm-ups
        training.turn_us(2 * _TURN_STEPS)
    times_us: dict[str, list[float]] = {kind: [] for kind in trainings}
    for number in range(rounds):
        for kind in trainings if number % 2 else reversed(trainings):
            times_us[kind].append(trainings[kind].turn_us())
    records = trainings["overlap"].handle._attached.session.trace.complete
    calls = statistics.median(record.update_calls for record in records)
    for training in trainings.values():
        if training.handle is not None:
            training.handle.detach()
    if dist.get_rank() == 0:
        print(f"{case}: {', '.join(f'{kind} {statistics.median(us):.0f} us' for kind, us in times_us.items())}")
        for mode in ("hook", "overlap"):
            triples = zip(times_us[mode], times_us["DDP"], times_us["plain"], strict=True)
            low, middle, high = statistics.quantiles(
                ((own - plain) / (ddp - plain) for own, ddp, plain in triples), n=4
            )
            parts = f", {calls:.0f} calls of the optimizer" if mode == "overlap" else ""
            print(f"    {mode} adds {middle:.2f} x what DDP adds ({low:.2f} to {high:.2f}{parts})", flush=True)


def worker(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in [args.case] if args.case else _CASES:
        measure(case, Path(args.folder), args.rounds, args.blocks)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="how often the loops take turns (default: 15)")
    parser.add_argument("--case", choices=_CASES, help="one optimizer only (default: all)")
    parser.add_argument("--blocks", type=int, default=6, help="blocks of the plan (default: 6)")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder:
        worker(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        run_workers([__file__, *sys.argv[1:], "--folder", folder], 2, timeout_s=_TIMEOUT_S, errors=sys.stderr)


if __name__ == "__main__":
    main()
