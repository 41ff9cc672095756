"""Delays Ctrl-C until a change that has to be complete is complete."""

import _signal
import contextlib
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def after_this() -> Iterator[None]:
    """Ctrl-C takes effect at the end of the block. Use it only for blocks that do not wait.

    Python runs signal handlers on the main thread only, so other threads need no delay. Neither do handlers that are
    not Python functions (None, SIG_IGN, SIG_DFL): they raise nothing.
    """
    # `signal` does the same, and makes enumerations of what it returns, which takes most of the time.
    handler = _signal.getsignal(_signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[Any] = []
    _signal.signal(_signal.SIGINT, lambda *arguments: caught.append(arguments))
    try:
        yield
    finally:
        _signal.signal(_signal.SIGINT, handler)
        if caught:
            handler(*caught[0])
