"""Delays Ctrl-C until a change that has to be complete is complete."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def after_this() -> Iterator[None]:
    """Ctrl-C takes effect at the end of the block. Use it only for blocks that do not wait.

    Python runs signal handlers on the main thread only, so other threads need no delay. Neither do handlers that are
    not Python functions (None, SIG_IGN, SIG_DFL): they raise nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[Any] = []
    signal.signal(signal.SIGINT, lambda *arguments: caught.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if caught:
            handler(*caught[0])
