"""Reads and writes files that the user has named. Each error names the file and its fault.

Everything that gradcast writes for a user goes through ``write_file``.
"""

import contextlib
import errno
import io
import os
import secrets
import select
import stat
import sys
import time
from pathlib import Path

from gradcast.errors import Error

_BYTES_MAX = 1 << 30  # of a file that is read: what is larger is none of ours, or never ends
# A program that is to write into a pipe may open it only after gradcast.
_WRITER_POLLS, _WRITER_POLL_S = 40, 0.05
_SILENCE_S = 5.0


def read_text(path: str, what: str) -> str:
    """Returns the text of a file that the user named. ``what``: its kind, for errors, such as "profile"."""
    try:
        # Tables that spreadsheets have saved begin with a byte order mark.
        return io.TextIOWrapper(io.BytesIO(read_bytes(path, what)), "utf-8-sig").read()
    except UnicodeDecodeError:
        raise Error(f"the {what} {path} is not UTF-8 text; check that it is the right file") from None


def read_bytes(path: str | Path, what: str) -> bytes:
    """Returns the content of a file or of a pipe. Raises Error for a device, and for a pipe without a writer."""
    try:
        # A pipe without a writer would wait for one without end.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            mode = os.fstat(descriptor).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
                raise Error(f"the {what} {path} is a device or a socket; give a file")
            start = _first_of_pipe(descriptor, path, what) if stat.S_ISFIFO(mode) else b""
            data = start + file.read(_BYTES_MAX + 1)
    except Error:
        raise
    except FileNotFoundError:
        raise Error(f"the {what} {path} does not exist; check the path") from None
    except OSError as error:
        raise Error(f"the {what} {path} cannot be read: {reason(error)}") from None
    except ValueError as error:  # a zero byte in the path
        raise Error(f"the {what} {path!r} cannot be read: {error}") from None
    if len(data) > _BYTES_MAX:
        raise Error(f"the {what} {path} is larger than {_BYTES_MAX >> 30} GiB; check that it is the right file")
    return data


def _first_of_pipe(descriptor: int, path: str | Path, what: str) -> bytes:
    """Waits for the first bytes of a pipe, and reports a long wait."""
    for _ in range(_WRITER_POLLS):
        try:
            if data := os.read(descriptor, 1 << 16):
                break
            time.sleep(_WRITER_POLL_S)
        except BlockingIOError:  # a writer has opened it
            data = b""
            break
    else:
        raise Error(f"no program writes into the pipe {path}, which is to be the {what}; give a file")
    os.set_blocking(descriptor, True)
    if not data and not select.select([descriptor], [], [], _SILENCE_S)[0]:
        print(f"gradcast: waiting for the program that writes the {what} into {path}", file=sys.stderr)
    return data


def reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def system_file(path: Path) -> str:
    """Returns the text of a file of /proc or /sys without surrounding white space, or "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def make_folder(path: str | Path) -> None:
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise Error(f"cannot create the folder {path}: {_why(error)}", "environment") from None


def write_file(path: str | Path, data: bytes | str, what: str) -> None:
    """Writes a file completely or not at all: readers see the old content or the new one, after a failure the old one.

    A link stays a link, and a file keeps its mode. ``what``: its kind, for errors, such as "report".
    """
    content = data if isinstance(data, bytes) else data.encode("utf-8")
    try:
        if _is_special(path):
            # There is nothing to keep, and a file in its place would be a disaster: programs count on /dev/null.
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC), "wb") as file:
                os.set_blocking(file.fileno(), True)
                file.write(content)
        else:
            _replace(os.path.realpath(path), content)
    except (OSError, ValueError) as error:
        raise Error(f"the {what} cannot be written to {path}: {_why(error)}", "environment") from None


def _is_special(path: str | Path) -> bool:
    """True for a device, a pipe or a socket, such as /dev/stdout."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _replace(target: str, content: bytes) -> None:
    folder = os.path.dirname(target)
    temporary = os.path.join(folder, f".gradcast-{secrets.token_hex(8)}")
    old = None
    if os.path.exists(target):
        old = os.stat(target)
        # Renaming asks for no right to the file itself.
        if not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, "the file is not writable")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            if old is not None:
                _take_over(descriptor, old)
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    # The new name is on the disk only with the folder. Not every file system lets it be written.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _take_over(descriptor: int, old: os.stat_result) -> None:
    """Gives the new file the owner, group and mode of the replaced one, as far as this user may."""
    new = os.fstat(descriptor)
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        with contextlib.suppress(PermissionError):
            os.fchown(descriptor, old.st_uid, old.st_gid)
    os.fchmod(descriptor, old.st_mode & 0o777)


def _why(error: OSError | ValueError) -> str:
    return reason(error) if isinstance(error, OSError) else str(error)


def check_writable(path: str | Path, what: str) -> None:
    """Raises Error if the path cannot be written, so that long work does not end with that."""
    try:
        why = _obstacle(path)
    except (OSError, ValueError) as error:
        why = _why(error)
    if why is not None:
        raise Error(f"the {what} cannot be written to {path}: {why}", "environment")


def _obstacle(path: str | Path) -> str | None:
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            return "it is a folder; name a file"
        if not os.access(path, os.W_OK):
            return "the file is not writable"
        if not stat.S_ISREG(mode):
            return None
    except FileNotFoundError:
        pass
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder):
        return f"the folder {folder} does not exist; make it first"
    return None if os.access(folder, os.W_OK) else f"the folder {folder} is not writable"
