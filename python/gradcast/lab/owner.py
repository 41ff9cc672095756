"""Whose leftovers are these: a process named so that it is never taken for a later one with the same number."""

import os
from pathlib import Path

_STATE, _START = 0, 19  # of the fields that follow the name of the program in /proc/<pid>/stat


def own_name() -> str:
    """``<pid>-<start>`` of this process, to be part of the name of what it makes."""
    pid = os.getpid()
    return f"{pid}-{_fields(pid)[_START]}"


def is_gone(name: str) -> bool:
    """Whether the process that ``own_name`` was called in has ended."""
    pid, _, start = name.partition("-")
    try:
        fields = _fields(int(pid))
    except (FileNotFoundError, ProcessLookupError):
        return True
    return fields[_STATE] in "ZX" or fields[_START] != start


def _fields(pid: int) -> list[str]:
    # The program's name may hold spaces and brackets; what follows its last bracket does not.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
