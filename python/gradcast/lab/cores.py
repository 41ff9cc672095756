"""The cores of the machine, which all hosts on it share: how busy they are, and who gets one at once."""

import contextlib
import ctypes
import os
import sys
from pathlib import Path

from gradcast.lab.errors import LabError

_PR_SET_TIMERSLACK = 29
_IDLE = (3, 4)  # of the fields of /proc/stat: idle, and idle while a disk works


class BusyCores:
    """Counts from when it is made."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._start = self._read()

    def share(self) -> float | None:
        """Of all cores' time since the start; None where too little has passed to tell."""
        passed = [end - start for start, end in zip(self._start, self._read(), strict=True)]
        total = sum(passed)
        return 1 - sum(passed[index] for index in _IDLE) / total if total > 0 else None

    def _read(self) -> list[int]:
        # user, nice, system, idle, iowait, irq, softirq, steal; what follows is part of user and nice.
        return [int(field) for field in self._stat.read_text().splitlines()[0].split()[1:9]]


def wake_promptly() -> None:
    """From now on this thread, and those that it starts, run when they are woken, as on a host with cores to spare.

    Linux otherwise rounds sleeps by 50 us, and a thread that is woken waits for up to a tick (4 ms) for a core that
    another host's thread is using: real-time threads do not. They nearly always wait, so nothing is starved.
    """
    if sys.platform != "linux" or ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0) != 0:
        raise LabError("the lab needs precise sleeps (prctl PR_SET_TIMERSLACK), which this system does not have")
    with contextlib.suppress(PermissionError):  # in some containers; times then scatter more
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
