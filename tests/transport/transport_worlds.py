"""Worlds for the tests of transports: ranks as threads of this process, and ranks as processes (transport_ranks.py)."""

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import _testing
from training.template import Forked
from transport_conformance import Case, Rank

RANKS = Path(__file__).with_name("transport_ranks.py")
BARRIER_S = 30.0
# All cases take some seconds together; the machine may be busy with other tests.
WORLD_S = 180.0


class InprocRank(Rank):
    """Each transport belongs to a world that all ranks make together: their k-th calls meet in the k-th world."""

    def __init__(self, rank: int, worlds: list["_testing.InprocWorld"], barrier: threading.Barrier) -> None:
        super().__init__(rank, barrier.parties)
        self._worlds, self._barrier = worlds, barrier
        self._made = 0

    def transport(self, buffers: Sequence[np.ndarray]) -> object:
        self._made += 1
        if self.rank == 0:
            self._worlds.append(_testing.InprocWorld(self.world_size))
        self.barrier()
        return self._worlds[self._made - 1].transport(self.rank, buffers)

    def barrier(self) -> None:
        self._barrier.wait()


def run_inproc(world_size: int, case: Case) -> None:
    """Raises what the first failing rank raised."""
    barrier = threading.Barrier(world_size, timeout=BARRIER_S)
    worlds: list[_testing.InprocWorld] = []
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            case(InprocRank(rank, worlds, barrier))
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + WORLD_S
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    # A broken barrier is what the others see of it.
    for error in sorted(failures, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error


@dataclass
class Ended:
    """How the process of one rank ended. ``code`` is None where it had to be killed."""

    code: int | None
    lines: list[str]
    errors: str


def run_processes(program: str, world_size: int, limit_s: float = WORLD_S) -> list[Ended]:
    """Runs a program of transport_ranks.py on every rank, and returns how each ended, by rank."""
    # One thread each; the network on loopback, whatever this machine's name resolves to; nothing of a caller's job.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCH", "GLOO_"))}
    environment = kept | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONFAULTHANDLER": "1"}
    paths = [str(RANKS.parents[1]), *filter(None, [kept.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [[program, f"{folder}/store", str(rank), str(world_size)] for rank in range(world_size)]
        processes = [Forked(str(RANKS), arguments, environment) for arguments in ranks]
        codes = _wait(processes, time.monotonic() + limit_s)
        printed = [process.communicate(10.0) for process in processes]
    return [Ended(code, out.splitlines(), errors) for code, (out, errors) in zip(codes, printed, strict=True)]


def _wait(processes: list[Forked], deadline_s: float) -> list[int | None]:
    codes: list[int | None] = []
    for process in processes:
        try:
            codes.append(process.wait(max(0.0, deadline_s - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append(None)
    for process in processes:
        process.kill()
        process.wait()
    return codes
