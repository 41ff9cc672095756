"""Engines of models that the program has dropped without detach().

The garbage collector runs on any thread, in the middle of anything, so nothing may wait there, and no lock be taken.
It only wakes the thread of the stall watchdog, which lets the blocks that travel arrive, since other ranks may still
wait for them, and ends the engine. The next attach, and the end of the program, wait until that has happened.
"""

import atexit
import ctypes
import dataclasses
import os
import queue
import threading
import time
import weakref
from typing import Any

from gradcast import _core
from gradcast.errors import Error
from gradcast.training.ranks import group_pool

_WAIT_SLICE_NS = 50_000_000
_WITHIN_S_AT_EXIT = 1.0


@dataclasses.dataclass(eq=False)
class EngineUse:
    """One engine and its group until they are closed or dropped. ``thread``: calls ``await_end`` and, after that has
    returned True, ``end``."""

    engine: _core.Engine | None
    group: Any
    thread: threading.Thread | None = None
    # Unlike an Event or a Queue, put() may interrupt any other method.
    _woken: "queue.SimpleQueue[bool]" = dataclasses.field(default_factory=queue.SimpleQueue)
    _hurried: threading.Event = dataclasses.field(default_factory=threading.Event)
    _finalizer: Any = None

    def begin(self, owner: Any) -> None:
        """``owner``: if it is garbage-collected, the engine is dropped."""
        self._finalizer = weakref.finalize(owner, self._on_dropped)
        self._finalizer.atexit = False

    def _on_dropped(self) -> None:
        _ending.append(self)
        self._woken.put(True)

    def close(self) -> None:
        """Whoever closes ends the engine. Idempotent."""
        self._finalizer.detach()
        self._woken.put(False)

    def await_end(self, limit_s: float) -> bool | None:
        """True if the engine was dropped, False if it was closed, None if neither within ``limit_s``."""
        try:
            return self._woken.get(timeout=limit_s)
        except queue.Empty:
            return None

    def end(self) -> None:
        try:
            if not self._has_arrived():
                group_pool.on_failure(self.group.own)
            self.engine.shutdown()
        finally:
            self.engine = self.group = None
            _ending.remove(self)

    def hurry(self) -> None:
        """What travels is given up."""
        self._hurried.set()

    def _has_arrived(self) -> bool:
        """Waits for what travels. False if that has failed, or can never arrive."""
        try:
            while self.engine.busy:
                if self._hurried.is_set() or not all(self.engine.timeline()[-1].ready_ns):
                    return False
                self.engine.wait_all(_WAIT_SLICE_NS)
            self.engine.wait([], 0)
        except Error as error:
            return error.code == "invalid_use"  # no iteration has begun
        return True


# Dropped, and not ended yet.
_ending: list[EngineUse] = []
_process = os.getpid()


def end_all(within_s: float) -> None:
    """Returns when all that was dropped has ended. ``within_s``: afterwards what travels is given up, which takes two
    seconds more at most."""
    end_s = time.monotonic() + within_s
    for use in list(_ending):
        use.thread.join(max(0.0, end_s - time.monotonic()))
        use.hurry()
        use.thread.join()


@atexit.register
def _end_at_exit() -> None:
    if os.getpid() == _process:
        end_all(_WITHIN_S_AT_EXIT)


def _in_child() -> None:
    # The destructor of an engine would wait for a thread that this process does not have.
    for use in _ending:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(use))
    _ending.clear()


os.register_at_fork(after_in_child=_in_child)
