"""Names of processes, to mark what they made. A later process with the same number has another name."""

import os
from pathlib import Path

_STATE, _START = 0, 19  # fields after the program's name in /proc/<pid>/stat


def own_name() -> str:
    """``<pid>-<start time>`` of this process."""
    pid = os.getpid()
    return f"{pid}-{_fields(pid)[_START]}"


def is_gone(name: str) -> bool:
    """Whether the process with this ``own_name()`` has ended."""
    pid, _, start = name.partition("-")
    try:
        fields = _fields(int(pid))
    except (FileNotFoundError, ProcessLookupError):
        return True
    return fields[_STATE] in "ZX" or fields[_START] != start


def _fields(pid: int) -> list[str]:
    # The program's name may contain spaces and brackets, so the fields start after the last bracket.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
