"""Objects of a snapshot as bytes. They are plain data and tensors, so that reading them runs no code of theirs."""

import contextlib
import io
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch

from gradcast.errors import refused

_lock = threading.Lock()  # torch keeps what may be read in one place for all threads


def to_bytes(value: Any, what: str) -> bytes:
    """A copy of the value, tensors in it included. ``what``: for errors. Raises Error(invalid_use)."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except MemoryError:
        raise
    except Exception as error:  # of the value's class: anything
        raise refused(
            f"{what} cannot be saved ({type(error).__name__}: {error}); let it be plain data: numbers, text, lists, "
            "dicts, tensors"
        ) from None
    return buffer.getvalue()


def from_bytes(value: bytes | bytearray) -> Any:
    """Reads a value. Raises as torch.load does, for ``others_in`` it, and for bytes that are none."""
    with _reading_numpy():
        return torch.load(io.BytesIO(value), map_location="cpu", weights_only=True)


def others_in(value: bytes | bytearray) -> list[str]:
    """The classes and functions in the value that are no plain data. Raises ValueError and others if it is none."""
    with _reading_numpy():
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(value)))


def require_plain(value: bytes, what: str) -> None:
    """Raises Error(invalid_use) for more than plain data in what is about to be saved."""
    if others := others_in(value):
        raise refused(
            f"{what} holds {', '.join(others)}, and a snapshot has room for plain data only (numbers, text, lists, "
            "dicts, tensors), since reading anything else can run code; omit it, or allow it in every run with "
            "torch.serialization.add_safe_globals([...])"
        )


@contextlib.contextmanager
def _reading_numpy() -> Iterator[None]:
    """Allows NumPy's numbers and arrays to be read inside: a learning rate from a schedule with numpy.cos is one."""
    with _lock:
        numpy = sys.modules.get("numpy")
        kinds = {type(numpy.dtype(each)) for each in "?bBhHiIlLqQefdFD"} if numpy else set()
        makers = [getattr(numpy, each)(1).__reduce__()[0] for each in ("float64", "zeros")] if numpy else []
        known = torch.serialization.get_safe_globals()
        wanted = [*kinds, *makers, numpy.ndarray, numpy.dtype] if numpy else []
        with torch.serialization.safe_globals([each for each in wanted if each not in known]):
            yield
