"""CPU time that gradcast adds to a step beside stock DDP, where compute costs nearly nothing.

    python -m benchmarks.host_cost [--parent FOLDER/python] [--fallback] [--tensors 300 1000] [--rounds 15]

Two workers train the same model of many small tensors in several ways, by turns of ten steps: in a plain loop, with
DDP, and in both modes attached to the bare module and to DDP. With ``--parent``, the ``python`` folder of another
checkout, two more workers do the same with that one's gradcast, so that both are measured at the same time, each beside
the plain loop of its own process. Counted is the CPU time of the thread that trains, and that of the whole process;
time that a thread waits is not counted.

Printed are the microseconds that each way adds to a step of the plain loop, relative to what DDP adds and to what the
parent adds (the median of the rounds, and the quartiles), and the median number of calls of the optimizer per step. The
overlap plan has so many blocks in the order of forward, which need most calls of the optimizer. With ``--fallback``
no plan is followed: gradcast finds that none gains anything, and runs as DDP.
"""

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradcast
from gradcast.lab import run_workers
from gradcast.training.plan.agreement import plan_text
from gradcast.training.plan.expectation import Expectation

_WIDTH = 8
_TURN_STEPS = 10
_WARMUP_TURNS = 4
_FALLBACK_TURNS = 30  # at most, until DDP reduces by itself
_TIMEOUT_S = 3600.0
_CASES = {
    "AdamW foreach": (torch.optim.AdamW, {"foreach": True}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "SGD foreach": (torch.optim.SGD, {"foreach": True, "momentum": 0.9}),
    "SGD fused": (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
}
_ATTACHED = ("hook", "overlap", "hook DDP", "overlap DDP")
_CLOCKS = {"thread": time.thread_time_ns, "process": time.process_time_ns}


class Training:
    """One loop of one kind: "plain", "DDP", or one of the attached ones."""

    def __init__(self, kind: str, case: str, tensors: int, plan: str | None = None) -> None:
        torch.manual_seed(0)
        self.module: nn.Module = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(tensors // 2)))
        make, settings = _CASES[case]
        self.optimizer = make(self.module.parameters(), lr=1e-3, **settings)
        self.handle = None
        if kind.endswith("DDP"):
            self.module = DistributedDataParallel(self.module)
        if kind in _ATTACHED:
            given = self.optimizer if kind.startswith("overlap") else None
            # A parent may be older than Planning.
            planning = getattr(gradcast, "Planning", lambda file: file)(file=plan)
            self.handle = gradcast.attach(self.module, given, options=gradcast.Options(plan=planning))
        self._batch = torch.randn(1, _WIDTH)

    def turn(self, steps: int = _TURN_STEPS) -> dict[str, float]:
        """CPU microseconds per step, by clock, and the calls of the optimizer per step."""
        before = {name: now() for name, now in _CLOCKS.items()}
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.module(self._batch).sum().backward()
            self.optimizer.step()
        if self.handle is not None:
            self.handle.flush()
        return {name: (now() - before[name]) / steps / 1e3 for name, now in _CLOCKS.items()} | {"calls": self._calls()}

    def _calls(self) -> float:
        events = [] if self.handle is None else self.handle.timeline()["traceEvents"]
        by_step = [event["args"]["step"] for event in events if event.get("cat") == "update"]
        return len(by_step) / len(set(by_step)) if by_step else 1.0


def make_plan(folder: Path, case: str, tensors: int, mode: str, block_count: int) -> str:
    """Writes a plan of equal blocks in the order of forward (overlap) or of backward (hook)."""
    training = Training(mode, case, tensors)
    training.turn()
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


def worker(args: argparse.Namespace) -> None:
    """One rank of one version of gradcast, which trains in its turns."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    (tensors,), folder = args.tensors, Path(args.folder)
    plans: dict[str, str] = {}
    if args.fallback:
        Expectation.is_worth_trying = False
    else:
        plans = {mode: make_plan(folder, args.case, tensors, mode, args.blocks) for mode in ("hook", "overlap")}
    own = [kind for version, kind in arms_of(args) if version == args.version]
    trainings = {kind: Training(kind, args.case, tensors, plans.get(kind.split()[0])) for kind in own}
    for training in trainings.values():  # warm-ups
        training.turn(_WARMUP_TURNS * _TURN_STEPS)
    for kind in ("hook DDP", "overlap DDP") if args.fallback and args.version == "new" else ():
        wait_for_ddp(trainings[kind])
    in_turn(args, lambda kind: trainings[kind].turn())
    for training in trainings.values():
        if training.handle is not None:
            training.handle.detach()
    dist.barrier()
    dist.destroy_process_group()


def wait_for_ddp(training: Training) -> None:
    """Trains until DDP reduces by itself. Where the machine is not quiet, gradcast measures again before."""
    for _ in range(_FALLBACK_TURNS):
        if training.handle.stats()["reduced_by_ddp"]:
            return
        training.turn()
    raise SystemExit("gradcast finds changes again and again: is the machine at rest?")


def arms_of(args: argparse.Namespace) -> list[tuple[str, str]]:
    """The loops that take turns, each a version of gradcast and a kind."""
    versions = ["new", "parent"] if args.parent else ["new"]
    return list(itertools.product(versions, ("plain", "DDP", *_ATTACHED)))


def in_turn(args: argparse.Namespace, run: Callable[[str], dict[str, float]]) -> None:
    """Runs this version's loops, each when the turn before has ended, and stores what rank 0 has measured."""
    store, arms = dist.TCPStore("127.0.0.1", args.port, is_master=False), arms_of(args)
    turns = [arm for number in range(args.rounds) for arm in (arms if number % 2 else reversed(arms))]
    for number, (version, kind) in enumerate(turns):
        if version != args.version:
            continue
        if number > 0:
            store.get(str(number - 1))
        dist.barrier()
        measured = run(kind)
        dist.barrier()
        if dist.get_rank() == 0:
            store.set(str(number), json.dumps([version, kind, measured]))


def measure(args: argparse.Namespace, case: str, tensors: int) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = [__file__, "--case", case, "--tensors", str(tensors), "--rounds", str(args.rounds)]
    arguments += ["--blocks", str(args.blocks), "--port", str(store.port)]
    arguments += ["--parent", args.parent] if args.parent else []
    arguments += ["--fallback"] if args.fallback else []
    paths = {"new": os.environ.get("PYTHONPATH", ""), "parent": args.parent}
    with contextlib.ExitStack() as stack:
        launchers = []
        for version in sorted({version for version, _ in arms_of(args)}):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            command = [sys.executable, *arguments, "--version", version, "--folder", folder]
            launchers.append(subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths[version]}))
        statuses = [each.wait() for each in launchers]
    if any(statuses):
        raise SystemExit("a version has failed")
    turns = [json.loads(store.get(str(number))) for number in range(args.rounds * len(arms_of(args)))]
    print(f"{case}, {tensors} tensors")
    for clock in _CLOCKS:
        show(clock, turns, args)


def show(clock: str, turns: Sequence[list], args: argparse.Namespace) -> None:
    times: dict[tuple[str, str], list[float]] = {arm: [] for arm in arms_of(args)}
    calls: dict[tuple[str, str], list[float]] = {arm: [] for arm in times}
    for version, kind, measured in turns:
        times[version, kind].append(measured[clock])
        calls[version, kind].append(measured["calls"])
    added = {arm: [own - base for own, base in zip(times[arm], times[arm[0], "plain"], strict=True)] for arm in times}
    plain, ddp = (statistics.median(times["new", kind]) for kind in ("plain", "DDP"))
    print(f"  CPU time of the {clock}: plain {plain:.0f} us, DDP {ddp:.0f} us")
    for kind in _ATTACHED:
        text = f"    {kind:11} adds {statistics.median(added['new', kind]):6.0f} us, "
        text += f"{ratio(added['new', kind], added['new', 'DDP'])} x DDP's"
        text += f", {statistics.median(calls['new', kind]):.1f} calls" if kind.startswith("overlap") else ""
        if args.parent:
            text += f"; {ratio(added['new', kind], added['parent', kind])} x the parent's"
            text += f", {statistics.median(calls['parent', kind]):.1f} calls" if kind.startswith("overlap") else ""
        print(text, flush=True)


def ratio(own: Sequence[float], other: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles((a / b for a, b in zip(own, other, strict=True)), n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="how often the loops take turns (default: 15)")
    parser.add_argument("--case", choices=_CASES, help="one optimizer only (default: all)")
    parser.add_argument("--tensors", type=int, nargs="+", default=[300, 1000], help="of the model (default: 300 1000)")
    parser.add_argument("--blocks", type=int, default=6, help="blocks of the plan (default: 6)")
    parser.add_argument("--fallback", action="store_true", help="follow no plan: run as DDP")
    parser.add_argument("--parent", help="the folder python of another checkout, to compare with")
    parser.add_argument("--version", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.version and "RANK" in os.environ:
        worker(args)
    elif args.version:
        run_workers(sys.argv, 2, timeout_s=_TIMEOUT_S, errors=sys.stderr)
    else:
        for case, tensors in itertools.product([args.case] if args.case else _CASES, args.tensors):
            measure(args, case, tensors)


if __name__ == "__main__":
    main()
