"""Two ranks on one device: how a program starts them, and ends them if they hang.

NCCL wants a GPU per rank on a host, so each rank passes for a host of its own. Where NCCL refuses them nevertheless, a
line says so, and they run over Gloo with tensors on the GPU.
"""

import argparse
import contextlib
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import IO, NamedTuple

import torch
import torch.distributed as dist

COUNT = 2
_REFUSAL = re.compile("Duplicate GPU|using the same GPU")
_ABORT_S = 5.0  # for a rank to print where its threads are


def as_a_host_of_its_own(rank: int) -> dict[str, str]:
    """Environment in which NCCL lets two ranks use one GPU: it compares hosts before devices. 2.30 has a variable that
    allows it, too."""
    return {
        "NCCL_HOSTID": f"gradcast-rank-{rank}",
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--backend", choices=["nccl", "gloo"], help="default: nccl on a GPU, gloo on the CPU")


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args = parser.parse_args()
    args.backend = args.backend or ("nccl" if args.device == "cuda" else "gloo")
    return args


def device_of(kind: str) -> torch.device:
    """The first device of this kind. Without one the program ends."""
    if kind == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no CUDA device here, or torch cannot use it")
    return torch.device(kind, 0) if kind == "cuda" else torch.device(kind)


def begin(args: argparse.Namespace, timeout_s: float) -> torch.device:
    """In a rank: joins the group. Without one the process ends."""
    torch.use_deterministic_algorithms(True)
    device = device_of(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(args.backend, timeout=timedelta(seconds=timeout_s))
    try:
        dist.all_reduce(torch.ones(1, device=device))
    except dist.DistBackendError as error:
        sys.exit(str(error))
    return device


class Ended(NamedTuple):
    """Exit codes, None for a rank that had to be ended, and what the ranks have printed."""

    codes: list[int | None]
    said: str


def start(
    module: str,
    arguments: Iterable[str],
    args: argparse.Namespace,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Runs two ranks of this module, and prints what they print."""
    command = [sys.executable, "-m", module, *arguments, "--device", args.device, "--backend", args.backend]
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(own.getsockname()[1]), "WORLD_SIZE": str(COUNT)}
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # To a whole group that hangs: the ranks print their stacks, which this program still has to pass on.
    signal.signal(signal.SIGABRT, lambda *_: None)
    said: list[str] = []
    processes, readers = [], []
    for rank in range(COUNT):
        own_place = {"RANK": str(rank), "GROUP_RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        settings = {
            "PYTHONFAULTHANDLER": "1",
            **place,
            **own_place,
            **as_a_host_of_its_own(rank),
            **(environment or {}),
        }
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
        processes.append(subprocess.Popen(command, env=os.environ | settings, **pipe))
        readers.append(threading.Thread(target=_pass_on, args=(processes[-1].stdout, said), daemon=True))
        readers[-1].start()
    codes = _wait(processes, time.monotonic() + limit_s)
    for reader in readers:
        reader.join(_ABORT_S)  # a process that a rank has left behind may hold the pipe
    if None in codes:
        print(f"after {limit_s:g} s the ranks {_numbers(codes)} had not ended; they were ended", flush=True)
    return Ended(codes, "".join(said))


def _numbers(codes: list[int | None]) -> str:
    return " and ".join(str(rank) for rank, code in enumerate(codes) if code is None)


def _pass_on(lines: IO[str], said: list[str]) -> None:
    for line in lines:
        said.append(line)
        print(line, end="", flush=True)


def _wait(processes: list[subprocess.Popen], end_s: float) -> list[int | None]:
    codes: list[int | None] = []
    for process in processes:
        try:
            codes.append(process.wait(max(0.0, end_s - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append(None)
    hung = [process for process, code in zip(processes, codes, strict=True) if code is None]
    for process in hung:
        process.send_signal(signal.SIGABRT)  # Python prints the stacks of its threads
    for process in hung:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_ABORT_S)
        process.kill()
        process.wait()
    return codes


def falls_back(ended: Ended, args: argparse.Namespace) -> bool:
    """Returns whether NCCL has refused the ranks, and sets Gloo as the backend then."""
    if args.backend != "nccl" or not any(ended.codes) or not _REFUSAL.search(ended.said):
        return False
    print("NCCL refuses two ranks on one GPU, so this runs over Gloo with tensors there", flush=True)
    args.backend = "gloo"
    return True
