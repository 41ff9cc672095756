"""Processes that live across tests and run one function at a time on every rank.

Importing torch takes seconds, so the processes are started once; each call gets a process group of its own, made of the
first ranks of the pool. After a failure of any kind the processes are replaced: nothing of a broken call is seen by the
next one.
"""

import functools
import inspect
import os
import signal
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

from training.needs import torch
from training.template import Forked

TESTS = Path(__file__).resolve().parents[1]
# How long the other ranks may still take once one has failed: enough to notice by themselves and say so.
GRACE_S = 10.0
START_S = 120.0


class RankError(AssertionError):
    """Some rank raised, died or took too long; the message holds what every rank said."""


def environment() -> dict[str, str]:
    """For every process that a test starts: one thread each, the network on loopback, nothing of the caller's job."""
    job = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
    job |= {"TORCHELASTIC_RUN_ID", "GRADCAST_PLAN", "GRADCAST_DISABLE"}
    kept = {name: value for name, value in os.environ.items() if name not in job}
    paths = [str(TESTS), *filter(None, [kept.get("PYTHONPATH")])]
    return kept | {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONFAULTHANDLER": "1",
    }


class Worker:
    """One process of the pool and the pipe to it."""

    def __init__(self, index: int, port: int) -> None:
        self.log = tempfile.NamedTemporaryFile(prefix=f"gradcast-rank{index}-", suffix=".log")  # noqa: SIM115
        self.heard_bytes = 0
        self.pipe, theirs = Pipe()
        self.process = Forked(
            "training.worker", [str(index), str(port)], environment(), self.log, inherited=(theirs.fileno(),)
        )
        theirs.close()

    def forget_output(self) -> None:
        self.heard_bytes = Path(self.log.name).stat().st_size

    def said(self) -> str:
        """Its output since forget_output(), the end of it if it is long."""
        return Path(self.log.name).read_bytes()[self.heard_bytes :].decode(errors="replace")[-12_000:].strip()

    def dump_stacks(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGUSR1)

    def end(self) -> None:
        self.pipe.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self.log.close()


class Pool:
    """run(world_size, function, *arguments) calls function(rank, *arguments) on each rank and returns the results.

    The function is a top-level one of a module in a package under tests; arguments and results are small plain values.
    A rank that waits for another one gives up after ``wait_s``, by default half of ``timeout_s``, and says where.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.store = torch.distributed.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=START_S)
        )
        self.workers: list[Worker] = []
        self.calls = 0

    def run(
        self, world_size: int, function: Callable, *arguments, timeout_s: float = 60.0, wait_s: float | None = None
    ) -> list:
        self._start(world_size)
        self.calls += 1
        ranks = self.workers[:world_size]
        call = (
            self.calls,
            world_size,
            function.__module__,
            function.__qualname__,
            arguments,
            wait_s or 0.5 * timeout_s,
        )
        answers: dict[int, tuple[str, object]] = {}
        try:
            for worker in ranks:
                worker.forget_output()
                worker.pipe.send(call)
            self._collect(ranks, answers, time.monotonic() + timeout_s)
        except OSError as error:  # a worker that died between two calls
            answers.setdefault(-1, ("failed", f"the pool itself: {error}"))
        if len(answers) == world_size and all(state == "done" for state, _ in answers.values()):
            return [answers[rank][1] for rank in range(world_size)]
        message = self._report(function, ranks, answers)
        self.end()
        raise RankError(message)

    def _collect(self, ranks: list[Worker], answers: dict, deadline_s: float) -> None:
        waiting: dict[Connection, int] = {worker.pipe: rank for rank, worker in enumerate(ranks)}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline_s - time.monotonic()))
            if not ready:
                return
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, OSError):
                    code = ranks[rank].process.wait(10)
                    answers[rank] = ("failed", f"the process ended with code {code}")
                if answers[rank][0] == "failed":
                    deadline_s = min(deadline_s, time.monotonic() + GRACE_S)

    def _report(self, function: Callable, ranks: list[Worker], answers: dict) -> str:
        silent = [rank for rank in range(len(ranks)) if rank not in answers]
        for rank in silent:
            ranks[rank].dump_stacks()
        time.sleep(0.5 if silent else 0.0)
        lines = [f"{function.__qualname__} on {len(ranks)} ranks:"]
        lines += [f"--- pool: {answers[-1][1]}"] if -1 in answers else []
        for rank, worker in enumerate(ranks):
            state, text = answers.get(rank, ("hangs", "no answer in time; its threads are in its output"))
            lines.append(f"--- rank {rank} {state}" + (f": {text}" if state != "done" else ""))
            lines += [f"    output: {worker.said()}"] if state != "done" and worker.said() else []
        return "\n".join(lines)

    def _start(self, count: int) -> None:
        assert count <= self.size, f"the pool has {self.size} processes"
        if any(worker.process.poll() is not None for worker in self.workers):
            self.end()
        self.workers += [Worker(index, self.store.port) for index in range(len(self.workers), count)]

    def end(self) -> None:
        for worker in self.workers:
            worker.end()
        self.workers = []


def on_ranks(world_size: int, **limits: float) -> Callable:
    """Makes a test of a function of one rank. It runs on each and returns what is wrong there, which has to be nothing.

    ``limits``: as for ``Pool.run``. The test's arguments are those of the function behind ``rank``.
    """

    def test_of(function: Callable) -> Callable:
        rank, *arguments = inspect.signature(function).parameters.values()

        @functools.wraps(function)
        def test(ranks: Pool, **given: object) -> None:
            found = ranks.run(world_size, function, *(given[each.name] for each in arguments), **limits)
            for index, wrong in enumerate(found):
                assert not wrong, f"rank {index}: {wrong}"

        test.__signature__ = inspect.Signature([rank.replace(name="ranks"), *arguments])
        test.on_rank = function
        return test

    return test_of
