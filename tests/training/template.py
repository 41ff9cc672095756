"""Programs in processes that are forked from one that has imported torch, which takes each process seconds by itself.

A program runs as ``python -m module arguments`` or ``python script.py arguments`` would, with the environment and the
files that it is given, leader of a session of its own. Nothing but torch is imported: what gradcast and frameworks do
when they are, for instance read the rank, comes in its turn.
Variables that libraries read when they are loaded (LD_PRELOAD, OMP_NUM_THREADS) are those of the first program.
"""

import ctypes
import importlib
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import IO

_IMPORTED = ("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor")
_REQUEST_BYTES_MAX = 1 << 17
_HANDLES_MAX = 4
_PR_SET_PDEATHSIG = 1


class Forked:
    """Such a program, to be used as a ``subprocess.Popen`` with pipes for its output as text."""

    def __init__(
        self,
        module: str,
        arguments: list[str],
        variables: dict[str, str],
        output: IO | None = None,
        inherited: tuple[int, ...] = (),
    ) -> None:
        """``output``: a file for all that it prints. ``inherited``: open files; their numbers in its process are its
        first arguments."""
        pipes = [] if output else [os.pipe(), os.pipe()]
        self._printed = {mine: bytearray() for mine, _ in pipes}
        self._open = set(self._printed)
        outputs = [theirs for _, theirs in pipes] or [output.fileno()] * 2
        self._told, told = Pipe(duplex=False)
        request = pickle.dumps((module, arguments, variables))
        socket.send_fds(_template(variables), [request], [told.fileno(), *outputs, *inherited])
        told.close()
        for _, theirs in pipes:
            os.close(theirs)
        self.pid: int = self._told.recv()
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not self._told.poll(timeout):
                raise subprocess.TimeoutExpired("a forked program", timeout)
            self.returncode = self._told.recv()
        return self.returncode

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Waits, also until no process that it has left behind holds its output."""
        deadline_s = time.monotonic() + timeout
        while self._open:
            ready = wait(self._open, max(0.0, deadline_s - time.monotonic()))
            if not ready:
                raise subprocess.TimeoutExpired("a forked program", timeout)
            for pipe in ready:
                more = os.read(pipe, 1 << 16)
                self._printed[pipe] += more
                if not more:
                    self._open.discard(pipe)
                    os.close(pipe)
        self.wait(max(0.0, deadline_s - time.monotonic()))
        out, errors = (printed.decode() for printed in self._printed.values())
        return out, errors

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has just ended, and its status is under way
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


_started: list[socket.socket] = []


def _template(variables: dict[str, str]) -> socket.socket:
    """The socket of the process that is forked; it ends with this one."""
    if not _started:
        requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            subprocess.Popen(
                [sys.executable, "-m", "training.template", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=variables,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        _started.append(requests)
    return _started[0]


def _serve(requests: socket.socket) -> tuple[str, list[str]]:
    """Forks for each request. Returns in the child, with the program that it is to run and its arguments."""
    while True:
        request, handles, _, _ = socket.recv_fds(requests, _REQUEST_BYTES_MAX, _HANDLES_MAX)
        if not request:
            os._exit(0)
        if not os.fork():
            break
        for handle in handles:
            os.close(handle)
    requests.close()
    told, output, errors, *inherited = handles
    with Connection(told, readable=False) as pipe:
        _wait_in_between(pipe)
        os.setsid()
        pipe.send(os.getpid())
    for handle, place in ((output, 1), (errors, 2)):
        os.dup2(handle, place)
        os.close(handle)
    module, arguments, variables = pickle.loads(request)
    os.environ.clear()
    os.environ.update(variables)
    return module, [*map(str, inherited), *arguments]


def _wait_in_between(pipe: Connection) -> None:
    """Forks, returns in the child, and reports how it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    program = os.fork()
    if program:
        code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
        with suppress(BrokenPipeError):
            pipe.send(code)
        os._exit(0)


if __name__ == "__main__":
    for name in _IMPORTED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those in between
    _program, sys.argv[1:] = _serve(socket.socket(fileno=int(sys.argv[1])))
    if _program.endswith(".py"):
        sys.path[0] = os.path.dirname(_program)
        runpy.run_path(_program, run_name="__main__")
    else:
        runpy._run_module_as_main(_program)  # what `python -m` calls
