"""Orderly ends of programs that use the lab: signals unwind them, and none interrupts their clean-up."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


def unwind_when_told_to_end() -> None:
    """Lets SIGTERM and a closed terminal unwind this process, as Ctrl-C does."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, _unwind)


def _unwind(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delays signals that end the program until the block has ended. The block must be bounded in time."""
    waiting = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, waiting)
