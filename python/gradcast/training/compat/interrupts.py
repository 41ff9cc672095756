"""Ctrl-C does not come between the parts of a change that has to be whole."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def after_this() -> Iterator[None]:
    """Ctrl-C takes effect at the end of the block. For blocks that wait for nobody.

    Python runs signal handlers on the main thread alone; elsewhere nothing has to be done. A handler that is not
    Python's (None, SIG_IGN, SIG_DFL) raises nothing.
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
