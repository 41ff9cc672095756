"""Programs of one rank for test_ends.py, on process groups of the tests' own that cannot do all that torch's can:
python -m training.ends_groups <name>.
"""

import os
import sys
import threading
import time
from datetime import timedelta

import torch
from torch import distributed

import _testing
from gradcast.training.compat import extension
from training.programs import tell

LIMIT_NS = 10_000_000_000
MOMENT_NS = 100_000_000
STUCK_S = 15.0


class Failing(distributed.Work):
    """Has begun, and then fails."""

    def get_future(self) -> torch.futures.Future:
        begun: torch.futures.Future = torch.futures.Future()
        failed = begun.then(lambda _: [].pop())
        begun.set_result(None)
        return failed


class Stuck(distributed.Work):
    """Waits long, and has no abort()."""

    def get_future(self) -> torch.futures.Future:
        return torch.futures.Future()

    def wait(self, timeout: timedelta | None = None) -> bool:
        del timeout
        threading.Event().wait(STUCK_S)
        return True


class Group(distributed.ProcessGroup):
    """Rank 0 of 2, and nobody is rank 1."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        backend = distributed.group.WORLD._get_backend(torch.device("cpu"))
        self._register_backend(torch.device("cpu"), distributed.ProcessGroup.BackendType.GLOO, backend)
        self.aborts = 0

    def abort(self) -> None:
        self.aborts += 1

    def allreduce(self, tensors: list[torch.Tensor], options: object = None) -> distributed.Work:
        del tensors, options
        return Failing()

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> distributed.Work:
        del tensors, peer, tag
        return Stuck()

    recv = send


class SlowToAbort(Group):
    """Its operations never end, and it takes long to give them up."""

    def allreduce(self, tensors: list[torch.Tensor], options: object = None) -> distributed.Work:
        del tensors, options
        return Stuck()

    def abort(self) -> None:
        threading.Event().wait(STUCK_S)


def started(wire: str, kind: type[Group] = Group) -> tuple[Group, "_testing.TransportDriver"]:
    group = kind()
    driver = _testing.TransportDriver(extension.load().Transport(group, [torch.ones(1000)], wire))
    driver.start(0, [(0, 4000)])
    return group, driver


def fails_alone() -> None:
    """What the engine does when the only operation in flight has failed: it aborts the transport."""
    group, driver = started("fp32")
    error = driver.wait(0, LIMIT_NS)
    before = group.aborts
    driver.abort("an operation has failed")
    tell(error=error, before=before, after=group.aborts)
    driver.abort("again")
    driver.close()
    tell(aborts=group.aborts)


def closes_what_is_stuck(wire: str, kind: str = "Group") -> None:
    _, driver = started(wire, globals()[kind])
    early = driver.wait(0, MOMENT_NS)
    start_s = time.monotonic()
    driver.abort("enough")
    driver.close()
    tell(early=early, error=driver.wait(0, LIMIT_NS), closed_s=time.monotonic() - start_s)
    # The threads that wait in Stuck are still there, and this is not about how Python ends them.
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=20))
    globals()[sys.argv[1]](*sys.argv[2:])
