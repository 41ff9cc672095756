"""How busy the cores of the machine are, all hosts on it taken together."""

from pathlib import Path

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
