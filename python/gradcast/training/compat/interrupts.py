"""Delays signal handlers until a change that has to be complete is complete.

A handler may do anything: stop the program as Ctrl-C does, or read parameters and optimizer state, as one that saves a
checkpoint does.
"""

import _signal
import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

_NUMBERS = range(1, _signal.NSIG)
_Caught = list[tuple[Callable[..., Any], int, Any]]


class _State:
    caught: _Caught | None = None  # by the block that is open, if one is

    @classmethod
    def forget(cls) -> None:
        """Called in a child that another thread has forked: the block ends in the parent only."""
        cls.caught = None


os.register_at_fork(after_in_child=_State.forget)


class _Delayed:
    """Stands in for a handler of the program's. If an exception has kept a block from putting that back, it is called
    all the same, and the next block puts it back."""

    def __init__(self, handler: Callable[..., Any]) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: Any) -> None:
        if _State.caught is None:
            self.handler(number, frame)
        elif all(number != each for _, each, _ in _State.caught):
            _State.caught.append((self.handler, number, frame))


@contextlib.contextmanager
def after_this() -> Iterator[None]:
    """Delays signals to the end of the block. Use it only for blocks that do not wait.

    Python runs signal handlers on the main thread only, so other threads need no delay. Neither do handlers that are
    not Python functions (None, SIG_IGN, SIG_DFL): they read nothing.
    """
    if threading.current_thread() is not threading.main_thread() or _State.caught is not None:
        yield
        return
    changed: list[int] = []
    try:
        # `signal` does the same, and makes enumerations of what it returns, which takes most of the time.
        for number in itertools.compress(_NUMBERS, map(callable, map(_signal.getsignal, _NUMBERS))):
            changed.append(number)
            handler = _signal.getsignal(number)
            if not isinstance(handler, _Delayed):
                _signal.signal(number, _Delayed(handler))
        _State.caught = []
        yield
    finally:
        caught, _State.caught = _State.caught or [], None
        try:
            for number in changed:
                handler = _signal.getsignal(number)
                if isinstance(handler, _Delayed):
                    _signal.signal(number, handler.handler)
        finally:
            with contextlib.ExitStack() as stack:  # all of them, also if one raises
                for handler, *arguments in caught:
                    stack.callback(handler, *arguments)
