"""Two ranks on one GPU over the real NCCL: beside other collectives, with other operations and wires, and failures.

    python -m benchmarks.gpu_cases [--backend gloo] [CASE ...]

Each case starts two processes that pass for two hosts, because NCCL wants a GPU per rank on a host. Where NCCL refuses
them nevertheless, this says so, and the cases run over Gloo with tensors on the GPU. Numbers have to be DDP's, bit for
bit; over a narrow wire they have to be near, and the same on both ranks. Where rank 1 loses its connections, is late,
or is killed, rank 0 has to get gradcast's error that names rank 1. Times say nothing.

``--device cpu --backend gloo`` shows that all but the device works.
"""

import argparse
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn

import gradcast
from benchmarks.gpu_training import Training, as_a_host_of_its_own, device_of
from gradcast import _core
from gradcast.comparison.compare import has_other_ops
from gradcast.training.plan.agreement import plan_text

_STEPS, _WIDTH, _LAYERS = 16, 64, 4
_TIMEOUT_S = 5.0  # of an operation, where one fails
_CASE_TIMEOUT_S = 120.0
_ENDS_AT = _STEPS // 2  # where something happens to rank 1
_GONE = ("a late rank", "a killed rank")  # of rank 1 nothing is expected
_ENDS = ("lost connections", *_GONE)


class Rank:
    def __init__(self, device: torch.device, backend: str, folder: str) -> None:
        self.device, self.backend, self.folder, self.index = device, backend, folder, dist.get_rank()
        self.begun_steps = 0
        generator = torch.Generator().manual_seed(self.index)
        self.batches = [torch.randn(32, _WIDTH, generator=generator).to(device) for _ in range(_STEPS)]

    def train(
        self,
        mode: str,
        *,
        metrics: bool = False,
        before_step: Callable[[int, Training], None] = lambda *_: None,
        **options: Any,
    ) -> list[torch.Tensor]:
        """The parameters of "ddp", "hook" or "overlap" after all batches, and the sums of the losses if ``metrics``: a
        collective of the program's own after each step. ``options``: as for ``Training``."""
        training = Training(mode, self.device, _WIDTH, layers=_LAYERS, **options)
        handle, found = training.handle, []
        for number, batch in enumerate(self.batches):
            before_step(number, training)
            self.begun_steps = number + 1
            loss = training.step(batch)
            if metrics:
                found.append(loss)
                with contextlib.nullcontext() if handle is None else handle.collective():
                    dist.all_reduce(loss)
        if handle is not None:
            self.profile, self.plan = handle.profile, handle.plan
        return found + training.end()


# A case returns what is wrong.
Problems = Iterator[str]


def _as_ddp(rank: Rank, modes: tuple[str, ...] = ("hook", "overlap"), **settings: Any) -> Problems:
    theirs = rank.train("ddp", **settings)
    for mode in modes:
        if not all(map(torch.equal, rank.train(mode, **settings), theirs)):
            yield f"the numbers differ from DDP's in {mode} mode"


def _pinned(rank: Rank) -> Problems:
    theirs = rank.train("ddp")
    rank.train("overlap")
    path = Path(rank.folder, "plan.json")
    if rank.index == 0:
        pieces = rank.profile.link.all_reduce.pieces  # for all three: only the operations matter
        link = _core.LinkModel(all_reduce=pieces, reduce_scatter=pieces, all_gather=pieces)
        plan = _core.make_plan(rank.profile, link, policy="dear", mode="overlap")
        path.write_text(plan_text(plan, rank.profile, None), encoding="utf-8")
    dist.barrier()
    plan = gradcast.Planning(str(path), adapt=False, warmup_steps=3)
    if not all(map(torch.equal, rank.train("overlap", plan=plan), theirs)):
        yield "the numbers differ from DDP's"
    if not has_other_ops(rank.plan):
        yield "the pinned plan has no reduce-scatter"


def _narrow(rank: Rank, wire: str) -> Problems:
    theirs, ours = (torch.cat([each.flatten() for each in rank.train(*way)]) for way in (("ddp",), ("overlap",)))
    if not torch.equal(theirs, ours):
        yield "without a narrow wire the numbers differ from DDP's"
    ours = torch.cat([each.flatten() for each in rank.train("overlap", wire=wire)])
    if torch.equal(theirs, ours):
        yield f"nothing has travelled as {wire}: the numbers are DDP's, bit for bit"
    if not torch.allclose(theirs, ours, atol=0.02):
        yield f"the numbers are up to {(theirs - ours).abs().max().item():.3f} from DDP's"
    both = [torch.empty_like(ours) for _ in range(2)]
    dist.all_gather(both, ours)
    if not torch.equal(*both):
        yield "the ranks have different numbers"


def _fails(rank: Rank, happens: Callable[[], None]) -> Problems:
    """``happens`` to rank 1 between two steps, while nothing travels."""

    def before_step(number: int, training: Training) -> None:
        if number == _ENDS_AT:
            training.handle.flush()
            dist.barrier()
            if rank.index == 1:
                happens()

    try:
        rank.train("overlap", before_step=before_step, watch=gradcast.Watch(timeout_s=_TIMEOUT_S))
    except gradcast.Error as error:
        print(f"rank {rank.index} is told: {error}", flush=True)
        if rank.begun_steps <= _ENDS_AT:
            yield f"it was raised in step {rank.begun_steps - 1}, before anything had happened: {error}"
        if error.code != "communication":
            yield f"the error's code is {error.code}"
        if not re.search("rank 1|ranks 0 and 1", str(error)):
            yield "the error does not name rank 1"
    else:
        yield "nothing was raised"


def _lose_connections() -> None:
    """As where a network fails: ends all connections of this process but those to torch's store."""
    store = int(os.environ["MASTER_PORT"])
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as each:
            if each.type == socket.SOCK_STREAM and store not in (each.getsockname()[1], each.getpeername()[1]):
                each.shutdown(socket.SHUT_RDWR)


CASES: dict[str, Callable[[Rank], Problems]] = {
    "batch norm": partial(_as_ddp, norm=nn.BatchNorm1d),
    "metrics": partial(_as_ddp, metrics=True),
    "SyncBatchNorm and metrics": partial(_as_ddp, norm=nn.SyncBatchNorm, metrics=True),
    "a pinned plan with reduce-scatter and all-gather": _pinned,
    "at most 2 thread blocks": partial(_as_ddp, nccl=gradcast.Nccl(max_ctas=2)),
    "registered memory": partial(_as_ddp, nccl=gradcast.Nccl(register_buffers=True)),
    "wire bf16": partial(_narrow, wire="bf16"),
    "wire fp16": partial(_narrow, wire="fp16"),
    "lost connections": partial(_fails, happens=_lose_connections),
    "a late rank": partial(_fails, happens=lambda: time.sleep(4 * _TIMEOUT_S)),
    "a killed rank": partial(_fails, happens=lambda: os.kill(os.getpid(), signal.SIGKILL)),
}
_PROBE = "probe"


def reason_to_leave_out(case: str, backend: str, device: str) -> str | None:
    if case == "SyncBatchNorm and metrics" and device == "cpu":
        return "SyncBatchNorm takes tensors on a GPU only"
    if case in ("at most 2 thread blocks", "registered memory") and backend != "nccl":
        return "that is for NCCL"
    if case.startswith("wire") and backend == "gloo" and device != "cpu":
        return "over Gloo, tensors on a GPU have no narrow wire"
    return None


def be_rank(case: str, args: argparse.Namespace) -> int:
    torch.use_deterministic_algorithms(True)
    device = device_of(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(args.backend, timeout=timedelta(seconds=_CASE_TIMEOUT_S))
    try:
        dist.all_reduce(torch.ones(1, device=device))
    except dist.DistBackendError as error:
        print(error, file=sys.stderr)
        return 1
    problems = [] if case == _PROBE else list(CASES[case](Rank(device, args.backend, args.folder)))
    for problem in problems:
        print(f"rank {dist.get_rank()}: {problem}", file=sys.stderr)
    if case not in _ENDS:
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if problems else 0)  # what has failed is not waited for


def run_case(case: str, args: argparse.Namespace) -> tuple[list[int | None], str]:
    """The exit codes of both ranks, None for one that had to be stopped, and what they have said."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(own.getsockname()[1]), "WORLD_SIZE": "2"}
    codes: list[int | None] = []
    with tempfile.TemporaryDirectory() as folder, open(os.path.join(folder, "log"), "w+", encoding="utf-8") as log:
        command = [sys.executable, "-m", "benchmarks.gpu_cases", case, "--folder", folder]
        command += ["--backend", args.backend, "--device", args.device]
        processes = []
        for rank in range(2):
            own_place = {"RANK": str(rank), "GROUP_RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            environment = os.environ | place | own_place | as_a_host_of_its_own(rank)
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        end_s = time.monotonic() + _CASE_TIMEOUT_S
        for process in processes:
            try:
                codes.append(process.wait(max(0.0, end_s - time.monotonic())))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                codes.append(None)
        log.seek(0)
        return codes, log.read()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of: {', '.join(CASES)} (default: all)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--backend", choices=["nccl", "gloo"], default="nccl")
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # for a rank
    args = parser.parse_args()
    if args.folder is not None:
        return be_rank(args.cases[0], args)
    device_of(args.device)
    if unknown := set(args.cases) - set(CASES):
        print(f"there is no case {sorted(unknown)}; there are: {', '.join(CASES)}", file=sys.stderr)
        return 1
    if args.backend == "nccl":
        codes, said = run_case(_PROBE, args)
        if codes != [0, 0]:
            if not re.search("Duplicate GPU|using the same GPU", said):
                print(f"two ranks over NCCL: exit codes {codes}\n{said}")
                return 1
            print(f"NCCL refuses two ranks on one GPU, so this runs over Gloo with tensors there:\n{said}")
            args.backend = "gloo"
    rows, failed = [], False
    for case in args.cases or CASES:
        reason = reason_to_leave_out(case, args.backend, args.device)
        if reason is not None:
            rows.append([case, f"left out: {reason}"])
            continue
        codes, said = run_case(case, args)
        is_right = codes[0] == 0 if case in _GONE else codes == [0, 0]
        failed = failed or not is_right
        rows.append([case, "passed" if is_right else "FAILED"])
        print(f"== {case}: exit codes {codes}\n{said}", flush=True)
    print(tabulate(rows, [f"over {args.backend}, tensors on {args.device}", ""]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
