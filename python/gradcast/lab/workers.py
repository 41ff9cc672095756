"""Runs one process per rank, with the environment that torchrun would give it, and never leaves a process behind."""

import ctypes
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

from gradcast.lab.errors import LabError
from gradcast.lab.hosts import Network
from gradcast.lab.program import uninterrupted

_PORT = 29500  # on a host of its own it is always free
_POLL_S = 0.05
_TERMINATE_S = 3.0
_LAST_LINES = 12
_LAST_BYTES = 8192
_PR_SET_PDEATHSIG = 1
_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None  # loaded before any fork


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    log: IO[bytes]  # has no name, so it never stays behind


def run_workers(
    arguments: Sequence[str],
    worker_count: int,
    *,
    timeout_s: float,
    network: Network | None = None,
    ranks_per_host: int = 1,
    output: IO[str] | None = None,
    errors: IO[str] | None = None,
    inherited: Sequence[IO[bytes]] = (),
) -> None:
    """Runs ``python arguments`` once per rank until all have ended, on the hosts of ``network`` or all on loopback.

    Ranks 0 to ``ranks_per_host`` - 1 are on the first host of the network, and so on.

    Rank 0 prints to ``output`` (standard output if None), and its errors go to ``errors`` if given. Other output is
    shown only in the LabError that is raised if a worker fails or does not end within ``timeout_s``. The workers
    inherit the open files ``inherited`` with the same file descriptors.
    """
    per_host = ranks_per_host if network else worker_count
    port = _PORT if network else _free_port()
    workers: list[_Worker] = []
    try:
        for rank in range(worker_count):
            command = [sys.executable, *arguments]
            if network:
                command = network.command(rank // per_host, command)
            log = tempfile.TemporaryFile()  # noqa: SIM115, closed by _end
            # With a session of its own, Ctrl-C reaches only this program, which ends its workers in order.
            process = subprocess.Popen(
                command,
                env={**os.environ, **_environment(rank, worker_count, per_host, network, port)},
                stdin=subprocess.DEVNULL,
                stdout=(output or sys.stdout) if rank == 0 else log,
                stderr=errors if rank == 0 and errors is not None else log,
                pass_fds=[file.fileno() for file in inherited],
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
            workers.append(_Worker(rank, process, log))
        _wait(workers, timeout_s)
    finally:
        _end(workers)


def run_for_result(
    function: str,
    arguments: Sequence[Any],
    worker_count: int,
    *,
    promptly: bool = False,
    inherited: Sequence[IO[bytes]] = (),
    **options: Any,
) -> Any:
    """Calls ``function`` ("package.module:name") on all ranks, and returns rank 0's result, through JSON.

    Ranks run like those of ``run_workers``, with Gloo. ``arguments`` are pickled. ``promptly``: see
    ``cores.wake_promptly``, for ranks that wait rather than compute.
    """
    with tempfile.TemporaryFile() as call, tempfile.TemporaryFile() as result:
        pickle.dump((function, arguments, promptly), call)
        call.flush()
        command = ["-m", "gradcast.lab.rank", *(f"/dev/fd/{file.fileno()}" for file in (call, result))]
        run_workers(command, worker_count, inherited=[call, result, *inherited], **options)
        result.seek(0)
        return json.load(result)


def _environment(rank: int, world_size: int, per_host: int, network: Network | None, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % per_host),
        "GROUP_RANK": str(rank // per_host),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(per_host),
        "MASTER_ADDR": network.address(0) if network else "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": network.interface if network else "lo",
        "OMP_NUM_THREADS": "1",  # as torchrun sets it: ranks share the cores
        "PYTHONUNBUFFERED": "1",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> None:
    if _PRCTL:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait(workers: list[_Worker], timeout_s: float) -> None:
    """Returns once all have ended without error. Raises LabError at the first failure, with those of other ranks."""
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [worker.process.poll() for worker in workers]
        if any(codes):
            raise LabError("\n".join(_failure(worker) for worker in workers if worker.process.returncode))
        if None not in codes:
            return
        if time.monotonic() > deadline:
            raise LabError(_overdue(workers, timeout_s))
        time.sleep(_POLL_S)


def _overdue(workers: list[_Worker], timeout_s: float) -> str:
    running = [worker for worker in workers if worker.process.poll() is None]
    ranks = ", ".join(str(worker.rank) for worker in running)
    return f"the run did not end within {timeout_s:g} s; still running: rank {ranks}{_last_lines(running[0].log)}"


def _failure(worker: _Worker) -> str:
    code = worker.process.returncode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    return f"rank {worker.rank} {how}{_last_lines(worker.log)}"


def _last_lines(log: IO[bytes]) -> str:
    # seek() and read() would move the position at which a running worker writes.
    size = os.fstat(log.fileno()).st_size
    text = os.pread(log.fileno(), _LAST_BYTES, max(0, size - _LAST_BYTES)).decode(errors="replace")
    lines = text.splitlines()[-_LAST_LINES:]
    return "; its last lines:\n" + "\n".join(f"  {line}" for line in lines) if lines else ""


def _end(workers: list[_Worker]) -> None:
    with uninterrupted():
        for worker in workers:
            if worker.process.poll() is None:
                worker.process.terminate()
        deadline = time.monotonic() + _TERMINATE_S
        for worker in workers:
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            worker.log.close()
