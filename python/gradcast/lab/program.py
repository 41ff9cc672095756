"""How programs that use the lab start and end: one sentence for an error, and clean-up that no signal interrupts."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from gradcast.errors import Error

_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


def unwind_when_told_to_end() -> None:
    """From now on SIGTERM and a closed terminal unwind this process, as Ctrl-C does."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, _unwind)


def run_program(main: Callable[[], int], name: str) -> int:
    """Runs ``main`` and returns the exit code. ``name``: of the program, for errors."""
    unwind_when_told_to_end()
    try:
        return main()
    except Error as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


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
