"""Starts a program of programs.py (or of another module) on every rank, as torchrun would, and waits for all of them,
but not without end."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from training.pool import environment
from training.template import Forked


@dataclass
class Ended:
    """How the process of one rank left. ``code`` is None where it had to be killed."""

    code: int | None
    out: str
    told: list[dict]  # its lines of JSON
    errors: str
    left_behind: bool  # a process of its group was still there


def free_port() -> int:
    """One below those that the system gives to connections, so that it is still free when the program takes it."""
    while True:
        port = random.SystemRandom().randrange(12_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def launch(
    world_size: int,
    program: str,
    *arguments: str,
    module: str = "training.programs",
    limit_s: float = 60.0,
    network=None,
    during: Callable[[list[subprocess.Popen | Forked]], None] | None = None,
) -> list[Ended]:
    """``module``: or the path of a script. ``network``: each rank on a host of its own. ``during`` is called with the
    processes while they run."""
    port = str(free_port())
    processes = []
    for rank in range(world_size):
        job = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world_size,
            "MASTER_ADDR": network.address(0) if network else "127.0.0.1",
            "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": network.interface if network else "lo",
        }
        variables = environment() | {name: str(value) for name, value in job.items()}
        # What is preloaded, and the host, are settled when a process starts.
        if network is None and "LD_PRELOAD" not in variables:
            processes.append(Forked(module, [program, *arguments], variables))
            continue
        command = [sys.executable, "-m", module, program, *arguments]
        processes.append(
            subprocess.Popen(
                network.command(rank, command) if network else command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=variables,
                start_new_session=True,
            )
        )
    deadline_s = time.monotonic() + limit_s
    try:
        if during is not None:
            during(processes)
        return [_wait(process, deadline_s) for process in processes]
    finally:
        for process in processes:
            # Once it has been waited for, its number may be another process's.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)


def _wait(process: subprocess.Popen | Forked, deadline_s: float) -> Ended:
    code = None
    try:
        out, errors = process.communicate(timeout=max(0.1, deadline_s - time.monotonic()))
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)  # faulthandler prints where every thread is
        out, errors = process.communicate(timeout=10)
    left_behind = _exists(process.pid)
    if left_behind:
        os.killpg(process.pid, signal.SIGKILL)
    told = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return Ended(code, out, told, errors, left_behind)


def _exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def require_ended_well(ends: list[Ended], code: int = 0) -> None:
    """No rank hung, crashed or left a process; C++ had no reason to speak."""
    for rank, end in enumerate(ends):
        assert end.code == code, f"rank {rank} ended with {end.code}\n{end.errors}"
        assert not end.left_behind
        for sign in ("terminate called", "Fatal Python error", "Segmentation fault", "leaked"):
            assert sign not in end.errors, end.errors


def require_network_error(end: Ended) -> dict:
    """Returns what a rank tells that has ended with an error of the network, which names the block."""
    assert end.code == 1, f"it ended with {end.code}\n{end.errors}"
    assert not end.left_behind
    told = end.told[-1]
    assert (told["error"], told["code"]) == ("Error", "communication"), told
    assert re.search(r"block \d+ of \d+", told["message"]), told
    return told


def torchrun(*program: str, rank_count: int = 2, limit_s: float = 120.0, **variables: str) -> str:
    """What a program of so many ranks prints that torchrun starts once more if a rank is killed. ``variables``: more of
    its environment."""
    # Without the first, torch 2.11 starts the group again on the store of its first life, where Gloo finds dead
    # addresses (a program of three lines without gradcast fails in the same way).
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TEST_TIMEOUT_S": "60"} | variables
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={rank_count}",
            "--max-restarts=1",
            *program,
        ],
        env=environment() | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            out, errors = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # it ends its workers, which a killed one would leave behind
            _, errors = process.communicate(timeout=60)
            pytest.fail(f"torchrun did not end within {limit_s} s\n{errors}")
    assert process.returncode == 0, errors
    return out
