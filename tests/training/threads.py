"""Threads of this process, as the system knows them."""

import contextlib
from pathlib import Path


def threads_named(part: str) -> list[str]:
    """The names in which this stands."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            names.append(task.joinpath("comm").read_text().strip())
    return [name for name in names if part in name]
