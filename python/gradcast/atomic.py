"""Writes a file completely or not at all: readers see the old content or the new, never a part."""

import contextlib
import os
import tempfile
from pathlib import Path

from gradcast.errors import Error

# The mode of new files under the usual umask; temporary files are private, and would stay so when renamed.
_MODE = 0o644


def write_atomically(path: str | Path, data: bytes | str, what: str) -> None:
    """``what``: the kind of file, for errors, such as "report"."""
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
    return Error(f"the {what} cannot be written to {path}: {reason}; name a file in an existing folder", "environment")
