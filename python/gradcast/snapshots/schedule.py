"""The step of the next snapshot, which the training thread comes to while the writers agree on it. Pure.

Thread safety: any thread.
"""

import threading

_LONGEST_WAIT_S = 120.0  # a rank that was killed agrees to nothing


class Schedule:
    """``step``: the number of steps made. ``next``: the step of the next snapshot, None if none is chosen."""

    def __init__(self, step: int, first: int) -> None:
        self._changed = threading.Condition()
        self.step = step
        self.next: int | None = first
        self._proposed: int | None = None
        self.has_ended = False

    def advance(self) -> bool:
        """Counts a step. Returns whether a snapshot of it is to be taken, which ends the choice. If the step is
        proposed, waits until the ranks agree. Raises TimeoutError if that takes too long."""
        with self._changed:
            self.step += 1
            if not self._changed.wait_for(lambda: self._proposed != self.step or self.has_ended, _LONGEST_WAIT_S):
                raise TimeoutError(f"the ranks did not agree on step {self.step} within {_LONGEST_WAIT_S:.0f} s")
            if self.next != self.step or self.has_ended:
                return False
            self.next = None
            return True

    def propose(self, step: int, instead_of: int | None) -> bool:
        """Returns whether this rank can take a snapshot of ``step``: it has not come to it yet, nor to what was chosen
        before. If so, it stops there until ``settle``."""
        with self._changed:
            fits = self.step < step and self.next == instead_of and not self.has_ended
            if fits:
                self._proposed = step
            return fits

    def settle(self, agreed: bool) -> None:
        """Ends the proposal. ``agreed``: all ranks can take it."""
        with self._changed:
            if agreed and self._proposed is not None:
                self.next = self._proposed
            self._proposed = None
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self.has_ended, self.next, self._proposed = True, None, None
            self._changed.notify_all()
