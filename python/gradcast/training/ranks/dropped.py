"""Engines of models that the program has dropped without detach().

The garbage collector runs on any thread, in the middle of anything, so nothing may wait there, and no lock be taken.
It only wakes the thread of the stall watchdog, which lets started blocks arrive, since other ranks may still wait for
them, and ends the engine. The next attach, and the end of the program, wait until that has happened.
"""

import atexit
import ctypes
import dataclasses
import logging
import os
import queue
import sys
import threading
import time
import weakref
from typing import Any

from gradcast import _core
from gradcast.errors import Error
from gradcast.training.ranks import group_pool

_log = logging.getLogger("gradcast")
_POLL_S = 0.02
# At the end of a program other ranks may still be on their way here, unless this one has failed.
_WITHIN_S_AT_EXIT, _WITHIN_S_AFTER_FAILURE = 60.0, 1.0


@dataclasses.dataclass(eq=False)
class EngineUse:
    """One engine and its group until they are closed or dropped. ``thread``: calls ``await_end`` and, after that has
    returned True, ``end``."""

    engine: _core.Engine
    group: Any
    thread: threading.Thread = dataclasses.field(init=False)
    # Unlike an Event or a Queue, put() may interrupt any other method.
    _woken: "queue.SimpleQueue[bool]" = dataclasses.field(default_factory=queue.SimpleQueue)
    _hurried: threading.Event = dataclasses.field(default_factory=threading.Event)
    _finalizer: Any = None

    def begin(self, owner: Any) -> None:
        """Begins the use. ``owner``: if it is garbage-collected, the engine is dropped."""
        self._finalizer = weakref.finalize(owner, self._on_dropped)
        self._finalizer.atexit = False

    def _on_dropped(self) -> None:
        _ending.append(self)
        self._woken.put(True)

    def close(self) -> None:
        """The caller ends the engine itself. Idempotent."""
        self._finalizer.detach()
        self._woken.put(False)

    def await_end(self, limit_s: float) -> bool | None:
        """Returns True if the engine was dropped, False if it was closed, None if neither within ``limit_s``."""
        try:
            return self._woken.get(timeout=limit_s)
        except queue.Empty:
            return None

    def end(self) -> None:
        try:
            if not self._has_arrived():
                group_pool.leave(self.group.own, reusable=False)
            self.engine.shutdown()
        finally:
            del self.engine, self.group
            _ending.remove(self)

    def hurry(self) -> None:
        """Gives up the blocks in flight."""
        self._hurried.set()

    def _has_arrived(self) -> bool:
        """Waits for the blocks that have started; others lack gradients that will never come. False if that has failed,
        or is given up."""
        quiet = 0
        while quiet < 2:  # the next block may be about to start
            in_flight = self._in_flight()
            quiet = 0 if in_flight else quiet + 1
            if in_flight and self._hurried.is_set():
                _log.warning(
                    "rank %d gives up %d blocks of a model that was dropped without handle.detach(), since other ranks "
                    "have not sent their part; call handle.detach() or handle.flush() on all ranks",
                    self.group.rank,
                    in_flight,
                )
                return False
            if self.engine.busy:
                time.sleep(_POLL_S)
        try:
            self.engine.wait([], 0)
        except Error as error:
            return error.code == "invalid_use"  # no iteration has begun
        return True

    def _in_flight(self) -> int:
        """The number of started blocks that have not finished. On a device the last two iterations may have some."""
        if not self.engine.busy:
            return 0
        blocks = [block for record in self.engine.timeline()[-2:] for block in record.blocks]
        return sum(block.launch_ns > 0 and block.finish_ns == 0 for block in blocks)


# Dropped, and not ended yet.
_ending: list[EngineUse] = []
_process = os.getpid()


def end_all(within_s: float) -> None:
    """Returns when all that was dropped has ended. ``within_s``: afterwards blocks in flight are given up, within two
    seconds more."""
    end_s, ending = time.monotonic() + within_s, list(_ending)
    for use in ending:
        use.thread.join(max(0.0, end_s - time.monotonic()))
    for use in ending:
        use.hurry()
    for use in ending:
        use.thread.join()


@atexit.register
def _end_at_exit() -> None:
    if os.getpid() == _process:
        has_failed = getattr(sys, "last_value", None) is not None
        end_all(_WITHIN_S_AFTER_FAILURE if has_failed else _WITHIN_S_AT_EXIT)


def _in_child() -> None:
    # The destructor of an engine would wait for a thread that this process does not have.
    for use in _ending:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(use))
    _ending.clear()


os.register_at_fork(after_in_child=_in_child)
