"""Delays signal handlers until a change that has to be complete is complete.

A handler may do anything: stop the program as Ctrl-C does, or read parameters and optimizer state, as one that saves a
checkpoint does.
"""

import _signal
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

_NUMBERS = range(1, _signal.NSIG)


@contextlib.contextmanager
def after_this() -> Iterator[None]:
    """Signals take effect at the end of the block. Use it only for blocks that do not wait.

    Python runs signal handlers on the main thread only, so other threads need no delay. Neither do handlers that are
    not Python functions (None, SIG_IGN, SIG_DFL): they read nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # `signal` does the same, and makes enumerations of what it returns, which takes most of the time.
    before = {
        number: handler
        for number, handler in zip(_NUMBERS, map(_signal.getsignal, _NUMBERS), strict=True)
        if callable(handler)
    }
    caught: dict[int, tuple[Any, ...]] = {}
    for number in before:
        _signal.signal(number, lambda number, frame: caught.setdefault(number, (number, frame)))
    try:
        yield
    finally:
        for number, handler in before.items():
            _signal.signal(number, handler)
        with contextlib.ExitStack() as stack:  # all of them, also if one raises
            for number, arguments in caught.items():
                stack.callback(before[number], *arguments)
