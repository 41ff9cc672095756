"""Two ranks on one GPU over the real NCCL: beside other collectives, with other operations and wires, and failures.

    python -m benchmarks.gpu_cases [--backend gloo] [CASE ...]

Each case starts two processes (see gpu_ranks.py). Numbers have to be DDP's or native FSDP's, bit for bit; over a narrow
wire they have to be near, and the same on both ranks. Where rank 1 loses its connections, is late, or is killed, rank 0
has to get gradcast's error that names rank 1. Times say nothing.

``--device cpu`` shows that all but the device works.
"""

import argparse
import contextlib
import os
import random
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import gradcast
from benchmarks import gpu_ranks as ranks
from benchmarks import gpu_resources
from benchmarks.gpu_training import Training
from gradcast import _core
from gradcast.comparison.compare import has_other_ops
from gradcast.training.plan.agreement import plan_text

_STEPS, _WIDTH, _LAYERS = 20, 64, 4
_TIMEOUT_S = 5.0  # of an operation, where one fails
_PAUSE_S = 0.004  # at most
_LEFT_OUT = 3  # exit status where no case has run
_ENDS_AT = _STEPS // 2  # where something happens to rank 1
_GONE = ("a late rank", "a killed rank")  # of rank 1 nothing is expected
_ENDS = ("lost connections", *_GONE)


class Rank:
    """``steps``: of the long cases, None for their own number."""

    def __init__(self, device: torch.device, folder: str, steps: int | None = None) -> None:
        self.device, self.folder, self.index, self.steps = device, folder, dist.get_rank(), steps
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
        """The parameters and buffers of "ddp", "hook" or "overlap" after all batches, and the sums of the losses if
        ``metrics``: a collective of the program's own after each step. ``options``: as for ``Training``."""
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


def _as_ddp(
    rank: Rank, modes: tuple[str, ...] = ("hook", "overlap"), *, around_ddp: bool = False, **settings: Any
) -> Problems:
    theirs = rank.train("ddp", **settings)
    for mode in modes:
        if not all(map(torch.equal, rank.train(mode, **settings, around_ddp=around_ddp), theirs)):
            yield f"the numbers differ from DDP's in {mode} mode"


def _as_fsdp(rank: Rank, native: str, ours: str = "") -> Problems:
    """``native``, ``ours``: names of the dimensions of FSDP's mesh, natively and with gradcast."""
    theirs = _train_sharded(rank, "native", native)
    for mode in ("hook", "overlap"):
        if not all(map(torch.equal, _train_sharded(rank, mode, ours or native), theirs)):
            yield f"the numbers differ from those of FSDP's own all-reduce in {mode} mode"


def _train_sharded(rank: Rank, mode: str, dimensions: str) -> list[torch.Tensor]:
    """The parameters after all batches, with one shard in each replica. A step's first pass is not all-reduced."""
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    training = Training("alone", rank.device, _WIDTH, layers=_LAYERS)
    mesh = init_device_mesh(rank.device.type, (ranks.COUNT, 1), mesh_dim_names=("replicas", "shards"))
    for each in (*training.module[::3], training.module):
        (replicate if dimensions == "replicas" else fully_shard)(each, mesh=mesh[tuple(dimensions.split())])
    training.sgd = torch.optim.SGD(training.module.parameters(), lr=0.05, momentum=0.9)
    if mode != "native":
        replicas = mesh.get_group("replicas") if dimensions == "shards" else None
        training.attach(mode, process_group=replicas)
    for batch in rank.batches:
        training.sgd.zero_grad()
        for reduces in (False, True):
            training.module.set_requires_all_reduce(reduces)
            training.backward(batch)
        training.sgd.step()
    return [each.to_local() for each in training.end()]


def _pause(device: torch.device) -> None:
    """For a time of each rank's own, on the host and on the device."""
    time.sleep(random.uniform(0, _PAUSE_S))
    if device.type == "cuda":
        torch.cuda._sleep(int(random.uniform(0, _PAUSE_S * 1e9)))


class _LateNorm(nn.BatchNorm1d):
    """Late in forward and in backward, on each rank by other times."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        _pause(inputs.device)
        outputs = super().forward(inputs)
        if outputs.requires_grad:
            outputs.register_hook(lambda gradient: _pause(gradient.device))
        return outputs


def _between_steps(_number: int, training: Training) -> None:
    _pause(next(training.module.parameters()).device)


def _in_launch_order(rank: Rank) -> Problems:
    """Settings that could hang are refused; with the others training has DDP's numbers."""
    yield from _as_ddp(rank, ("hook",), metrics=True)
    for mode, norm in (("overlap", nn.LayerNorm), ("hook", nn.SyncBatchNorm)):
        try:
            rank.train(mode, norm=norm)
        except gradcast.Error as error:
            if "NCCL begins operations in the order" not in str(error):
                yield f"the error says something else: {error}"
        else:
            yield f"{mode} mode with {norm.__name__} was not refused"


def _next_iteration(_number: int, _training: Training) -> None:
    torch.compiler.cudagraph_mark_step_begin()


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


class Case(NamedTuple):
    run: Callable[[Rank], Problems]
    needs: str = ""  # "nccl", a "gpu", or a narrow "wire"
    environment: Mapping[str, str] = {}


def _connections(count: int) -> Case:
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": str(count), "NCCL_LAUNCH_ORDER_IMPLICIT": "0"}
    return Case(partial(_as_ddp, norm=nn.SyncBatchNorm, metrics=True), "gpu", environment)


def _with_nccl(**settings: Any) -> Case:
    return Case(partial(_as_ddp, nccl=gradcast.Nccl(**settings)), "nccl")


CASES: dict[str, Case] = {
    "batch norm": Case(partial(_as_ddp, norm=nn.BatchNorm1d)),
    "DDP with batch norm on late ranks": Case(
        partial(_as_ddp, norm=_LateNorm, around_ddp=True, metrics=True, before_step=_between_steps)
    ),
    "metrics": Case(partial(_as_ddp, metrics=True)),
    "SyncBatchNorm and metrics": Case(partial(_as_ddp, norm=nn.SyncBatchNorm, metrics=True), "gpu"),
    **{f"SyncBatchNorm and metrics, {count} connections": _connections(count) for count in (2, 8, 32)},
    "the launch order of NCCL": Case(_in_launch_order, "nccl", {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}),
    "a pinned plan with reduce-scatter and all-gather": Case(_pinned),
    "at most 2 thread blocks": _with_nccl(max_ctas=2),
    "fewer thread blocks": _with_nccl(cta_policy="efficiency"),
    "registered memory": _with_nccl(register_buffers=True),
    "wire bf16": Case(partial(_narrow, wire="bf16"), "wire"),
    "wire fp16": Case(partial(_narrow, wire="fp16"), "wire"),
    "blocks compiled with reduce-overhead": Case(
        partial(_as_ddp, compile_mode="reduce-overhead", before_step=_next_iteration)
    ),
    "replicate": Case(partial(_as_fsdp, native="replicas")),
    "HSDP": Case(partial(_as_fsdp, native="replicas shards")),
    "FSDP beside a group of replicas": Case(partial(_as_fsdp, native="replicas shards", ours="shards")),
    "memory": Case(gpu_resources.memory),
    "tiny steps": Case(gpu_resources.tiny_steps),
    "lost connections": Case(partial(_fails, happens=_lose_connections)),
    "a late rank": Case(partial(_fails, happens=lambda: time.sleep(4 * _TIMEOUT_S))),
    "a killed rank": Case(partial(_fails, happens=lambda: os.kill(os.getpid(), signal.SIGKILL))),
}


def reason_to_leave_out(case: str, backend: str, device: str) -> str | None:
    needs = CASES[case].needs
    if needs == "gpu" and device == "cpu":
        return "SyncBatchNorm takes tensors on a GPU only"
    if needs == "nccl" and backend != "nccl":
        return "that is for NCCL"
    if needs == "wire" and backend == "gloo" and device != "cpu":
        return "over Gloo, tensors on a GPU have no narrow wire"
    return None


def be_rank(case: str, args: argparse.Namespace) -> int:
    device = ranks.begin(args, timeout_s=args.limit)
    random.seed(dist.get_rank())
    problems = list(CASES[case].run(Rank(device, args.folder, args.steps)))
    for problem in problems:
        print(f"rank {dist.get_rank()}: {problem}", file=sys.stderr)
    if case not in _ENDS:
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if problems else 0)  # what has failed is not waited for


def run_case(case: str, args: argparse.Namespace) -> ranks.Ended:
    with tempfile.TemporaryDirectory() as folder:
        arguments = [case, "--folder", folder, "--limit", str(args.limit)]
        arguments += ["--steps", str(args.steps)] if args.steps else []
        return ranks.start("benchmarks.gpu_cases", arguments, args, args.limit, CASES[case].environment)


def state_of(case: str, args: argparse.Namespace) -> str:
    reason = reason_to_leave_out(case, args.backend, args.device)
    if reason is not None:
        return f"left out: {reason}"
    print(f"== {case}, over {args.backend}, tensors on {args.device}", flush=True)
    ended = run_case(case, args)
    if ranks.falls_back(ended, args):
        return state_of(case, args)
    is_right = ended.codes[0] == 0 if case in _GONE else ended.codes == [0] * ranks.COUNT
    return "passed" if is_right else f"FAILED, exit codes {ended.codes}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of: {', '.join(CASES)} (default: all)")
    ranks.add_options(parser)
    parser.add_argument("--limit", type=float, default=120, help="seconds until a case is ended (default: 120)")
    parser.add_argument("--steps", type=int, help="of the cases with many (default: 500 and 2,000)")
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # for a rank
    args = ranks.parsed(parser)
    if args.folder is not None:
        return be_rank(args.cases[0], args)
    ranks.device_of(args.device)
    if unknown := set(args.cases) - set(CASES):
        print(f"there is no case {sorted(unknown)}; there are: {', '.join(CASES)}", file=sys.stderr)
        return 1
    states = set()
    for case in args.cases or CASES:
        state = state_of(case, args)
        print(f"case {case}: {state}", flush=True)
        states.add(state.split()[0])
    if "FAILED," in states:
        return 1
    return 0 if "passed" in states else _LEFT_OUT


if __name__ == "__main__":
    sys.exit(main())
