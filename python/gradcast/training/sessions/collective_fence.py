"""Open ``handle.collective()`` blocks, inside which the program's own collectives run and no block may start."""

import contextlib
from collections.abc import Callable, Iterator

import torch

from gradcast.errors import refused


class CollectiveFence:
    """One attachment has one. ``open_count``: how many blocks are open, one inside another."""

    def __init__(self) -> None:
        self.open_count = 0

    @contextlib.contextmanager
    def around(self, complete: Callable[[], bool]) -> Iterator[None]:
        """``complete``: waits until nothing travels. False if another thread is in backward, so that more will."""
        if torch._C._current_graph_task_id() != -1:
            raise refused(
                "handle.collective() is used inside a backward pass, which has more gradients to send; put the "
                "collective behind backward()"
            )
        if not complete():
            raise refused(
                "handle.collective() is used while another thread is in backward, which has more gradients to send; "
                "wait for that thread first"
            )
        self.open_count += 1
        try:
            yield
        finally:
            self.open_count -= 1

    def refuse(self, what: str) -> None:
        """Raises inside a block. ``what``: would send something."""
        if self.open_count > 0:
            raise refused(
                f"{what} inside handle.collective() would send among the program's own collectives; end the block first"
            )
