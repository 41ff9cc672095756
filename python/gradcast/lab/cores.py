"""Load of the machine and of a host: busy cores, prompt threads, and bytes that leave the host."""

import contextlib
import ctypes
import os
import sys
from pathlib import Path

from gradcast.lab.errors import LabError

_PR_SET_TIMERSLACK = 29
_IDLE = (3, 4)  # fields of /proc/stat: idle, and idle while a disk works


class BusyCores:
    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._start = self._read()

    def share(self) -> float | None:
        """Returns the busy share of all cores' time; None if too little time has passed."""
        passed = [end - start for start, end in zip(self._start, self._read(), strict=True)]
        total = sum(passed)
        return 1 - sum(passed[index] for index in _IDLE) / total if total > 0 else None

    def _read(self) -> list[int]:
        # user, nice, system, idle, iowait, irq, softirq, steal; the remaining fields are part of user and nice.
        return [int(field) for field in self._stat.read_text().splitlines()[0].split()[1:9]]


def sent_bytes() -> int:
    """Returns the bytes, headers included, that have left this host by the interface that Gloo uses."""
    return int(Path(f"/sys/class/net/{os.environ['GLOO_SOCKET_IFNAME']}/statistics/tx_bytes").read_text())


def wake_promptly() -> None:
    """Lets this thread, and those that it starts, run as soon as they are woken, as on an idle host.

    Otherwise Linux rounds sleeps by 50 us, and a thread that is woken waits up to a tick (4 ms) for a core that another
    host's thread uses. Real-time threads do not wait. They sleep nearly all the time, so other threads are not starved.
    """
    if sys.platform != "linux" or ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0) != 0:
        raise LabError("the lab needs precise sleeps (prctl PR_SET_TIMERSLACK), which only Linux has; run it there")
    with contextlib.suppress(PermissionError):  # in some containers; times then vary more
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
