"""Writes a file whole or not at all: who reads it meanwhile sees the old one or the new one, never a half."""

import contextlib
import os
import tempfile
from pathlib import Path

from gradcast.errors import Error

# What a new file has under the usual umask; the temporary one is private, and would stay so under its new name.
_MODE = 0o644


def write_atomically(path: str | Path, data: bytes | str, what: str) -> None:
    """``what`` is for the message: "report"."""
    target = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise _refused(target, what, error) from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data if isinstance(data, bytes) else data.encode("utf-8"))
        os.chmod(temporary, _MODE)
        os.replace(temporary, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise _refused(target, what, error) from None


def _refused(path: Path, what: str, error: OSError) -> Error:
    reason = (error.strerror or str(error)).lower()
    return Error(f"the {what} cannot be written to {path}: {reason}; name a file in a folder that is there")
