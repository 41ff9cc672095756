"""Signals that end the program, held back until a last snapshot is complete.

Thread safety: the main thread, where Python runs handlers.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Collection
from typing import Any


class Signals:
    """``numbers``: of the signals. ``on_first``: called when the first comes. Signals that the program ignores, or that
    something other than Python handles, stay as they are."""

    def __init__(self, numbers: Collection[int], on_first: Callable[[], None]) -> None:
        self.received: int | None = None
        self._process = os.getpid()
        self._is_over = False
        self._on_first = on_first
        self._before: dict[int, Any] = {}
        for number in numbers if threading.current_thread() is threading.main_thread() else ():
            before = signal.getsignal(number)
            if before is not None and before is not signal.SIG_IGN:
                self._before[number] = before
                signal.signal(number, self._receive)

    def _receive(self, number: int, frame: Any) -> None:
        # Another handler has kept this one and calls it, or a forked child has it, which takes no snapshots.
        if self._is_over or os.getpid() != self._process:
            before = self._before[number]
            if before is signal.SIG_DFL:
                signal.signal(number, before)
                signal.raise_signal(number)
            else:
                before(number, frame)
        elif self.received is not None:  # once more: not to be held back
            first = self.received
            self.restore()
            self.pass_on()
            if number != first:
                signal.raise_signal(number)
        else:
            self.received = number
            self._on_first()

    def restore(self) -> None:
        """Restores the program's own handlers, unless it has set others since."""
        for number, before in self._before.items():
            with contextlib.suppress(ValueError):  # of another thread than the main one
                if signal.getsignal(number) == self._receive:
                    signal.signal(number, before)
        self._is_over = True

    def pass_on(self) -> None:
        """Lets the signals that were held back take effect, as without this. REQUIRES: ``restore``."""
        number, self.received = self.received, None
        if number is not None:
            signal.raise_signal(number)
